"""The course: chapters, pictures, exercises, and the pages around them."""
