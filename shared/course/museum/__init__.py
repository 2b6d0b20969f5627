"""The museum of bugs: what real projects shipped, planted in your own copy. `python -m shared.course.museum list`."""
