"""Several sources at once, documents that do not see each other, and windows of whole documents."""
