"""Text -> documents -> sentences -> the folder of binarised data that ``fairseq-train`` reads."""
