"""The museum of bugs that real projects shipped, planted in the student's own copy:
`python -m shared.course.museum list`."""
