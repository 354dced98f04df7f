"""The systemd units: from templates and settings to texts, from texts to files, and the service
manager that reads them.
"""
