"""Replicated parameters: what is not sharded trains as stage 0 under ``torch.compile(model, backend="zero")``.

That is a model of which nothing is sharded, or what stands beside the sharded part of one. When a backward ends, the
gradients that it brought are averaged over the ranks, as DDP does. A parameter that was used on some ranks only counts
as zero on the others. Nothing else is sent, so ranks may evaluate as they like.
"""
