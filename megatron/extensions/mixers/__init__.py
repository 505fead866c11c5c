"""Token mixers other than softmax attention: linear attention, state-space layers, convolutions."""
