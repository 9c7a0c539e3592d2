"""Random models, drafts and requests for long: the text stays that of plain decoding, memory stays flat."""
