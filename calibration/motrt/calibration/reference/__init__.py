"""The reference side of parity: the public PyTorch implementations, run in a process of their own.

``python -m motrt.calibration.reference REQUEST_DIR`` reads ``request.json`` and ``arrays.npz``, runs
diffusers and transformers, and writes ``result.npz`` and ``result.json`` beside them. It shares files with
the candidate side and no code: nothing here imports another ``motrt`` package.
"""
