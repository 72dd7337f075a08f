"""Device code of stage 3: functions for Triton's compiler, and their launches."""
