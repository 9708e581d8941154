"""Who owns which page (torch-free bookkeeping), and the tensors that the pages are."""
