"""The EAGLE-3 draft: model, attention of the training-time test, first weights, decoding."""
