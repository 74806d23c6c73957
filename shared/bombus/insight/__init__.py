"""What people look at: a run's figures by step, as charts, a page, a report, tables and trackers."""
