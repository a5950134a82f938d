"""Parts of report.py: reading run folders, analysing predictions, and the page about both."""
