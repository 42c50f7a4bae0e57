"""What a run says of itself: rows of figures, Prometheus, speed."""
