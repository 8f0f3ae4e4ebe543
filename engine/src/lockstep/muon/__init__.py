"""Muon: orthogonalized updates of matrices, spread over ranks."""
