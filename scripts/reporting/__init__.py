"""Parts of report.py: what run folders say, what predictions show, and the page of both."""
