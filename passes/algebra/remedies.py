"""What would make a refused rule match: from the words of a refusal to the change to the model or the option.

The first row whose pattern is found in a reason answers; its groups may be used in the remedy as ``{0}``, ``{1}``. A
test holds that every reason that a rule can give is found here.
"""

import re

_WORD = r"([\w.]+)"

REMEDIES: tuple[tuple[str, str], ...] = (
    # Values that would vanish
    (
        rf"the intermediate {_WORD} is used elsewhere, by {_WORD}",
        "compute what {1} needs without {0}, or drop that use: a fused operator leaves no intermediate values behind",
    ),
    (r"the values of the top-k are used", "use the indices alone; gather the scores again where their values matter"),
    (r"the order of the top-k", "treat the picks as a set (a scatter into a mask, a sum over them), not as a ranking"),
    (
        r"the picks are used without the indexer's mask|what is read through a hidden pick is used",
        "mask the picked keys once more with the mask that the scores had before the top-k",
    ),
    (r"the picked keys are used by", "use the picked keys in the mask of an attention only"),
    (r"the weights are used \d+ times", "return or reuse the attention's output instead of its weights"),
    (r"the weights go into", "multiply the softmax with the values directly (no dropout, no rescaling in between)"),
    (rf"{_WORD} is used elsewhere, by {_WORD}", "read {0} in this step only; let {1} read it in the next one"),
    # Collectives
    (
        r"it is no sum and no gather|is no contiguous run of words|each rank sends|is no dim of the mesh",
        "the library's collective serves it; raise most-summed or most-gathered of fuse-collectives for larger ones",
    ),
    # States that are logged
    (
        r"its gate and norms are computed before it|comes from .*, not from a short_conv",
        "write convolution, gate and norms of the layer as kimi_k31 does, and leave marks and raise-kda on",
    ),
    (
        r"a state is no input of|is used elsewhere, or not replaced by|is read behind its write|is taken \d+ times",
        "read each recurrent state in its layer alone, and replace it once, with what the layer returns",
    ),
    (
        r"it takes several tokens, a pool of states",
        "decode one token a sequence, over states of their own, or leave state_log out",
    ),
    (
        r"is no input of the step, or is used elsewhere",
        "read each recurrent state in its layer alone, or leave state_log out",
    ),
    # Routed experts
    (
        r"the router's top-k takes",
        "let the router pick a constant number of experts by their largest scores, over the last dim",
    ),
    (
        r"the experts' (scores are|weights)|the sum of the experts' weights",
        "score experts with a sigmoid, add the bias for the choice alone, and divide the picked scores by their sum",
    ),
    (
        r"the experts' groups|the experts of other groups",
        "score a group by the sum of its two best experts, and mask the experts of the other groups with -inf",
    ),
    (
        r"the activation is neither|the experts: (gate and up|the activation's)",
        "write experts as down(silu(gate) up) or with SiTU, gate and up being the halves of one product",
    ),
    (
        r"the experts: (rows, weights and result|weights \[)",
        "give the experts' weights the type and the widths of the rows that they multiply",
    ),
    (
        r"the experts: ",
        "gather the picked experts' weights (batched_mm), or sort the picks and use torch's grouped product, then sum "
        "the outputs times the router's weights over the picks of a token",
    ),
    (
        r"added to the routed experts|the shared experts have",
        "nothing to change in the model: what follows the experts stays products of its own",
    ),
    # What a large operator takes in
    (
        r"the gate's (logits are|product)",
        "give the gate's logits as one product of at most 256 numbers a token, without bias, and use them nowhere else",
    ),
    (
        r"what is added to the experts|reads the experts' choice",
        "add a tensor of the shape and type of the experts' result to it, right behind them",
    ),
    # Norms
    (
        r"the root does not scale what was squared|the root is not that of a mean of squares",
        "multiply the tensor itself by the reciprocal root of its mean square",
    ),
    (
        r"the norm is not rounded to the type of its operand",
        "cast the norm back to the type of what is normed, before or right after its weight",
    ),
    # Order of reads and writes
    (
        r"is written between its use and",
        "move the write before the first read in the step (update caches first, then attend), or after the last one",
    ),
    (
        r"is read from the cache that is written",
        "compute the new rows from the inputs of the step, and read the cache after it is written",
    ),
    (
        r"no single kernel: ",
        "write a tensor once in a step, after all that reads its old values, and read what was written from the write's"
        " own result",
    ),
    (
        r"the cached inputs are (written|not replaced)",
        "write the convolution's state once: the newest columns",
    ),
    # Types
    (
        r"weight and latent differ in type",
        "give the expanding weight the type of the latent cache: --dtype for the whole model, or cast the weight once",
    ),
    (
        r"is (\S+), wanted |the cache is |the window is|the result is used as",
        "use one of the types named, for example with --dtype",
    ),
    # Attention residuals
    (
        r"the logits are|the (logits|mixture): |the tokens are grouped|no sum of weighted sources",
        "write the residual as softmax over the sources of (query norm) v / rms(v), and sum the same stacked v by it",
    ),
    (r"sources are stacked, at most", "mix fewer blocks at a time: a larger attn_res_block_size"),
    # Gates of a marked prefill
    (
        r"the raw gate or strength: ",
        "nothing to change in the model: the operator takes the gate and the strength as they are computed",
    ),
    (r"\(GDN\)", "nothing to change in the model: the operator takes the computed decay, one a head"),
    (r"grouped, as in GDN", "repeat q and k before the convolution, or leave this layer to ATen"),
    # The Lightning Indexer's score
    (r"expected relu", "put relu between the products of query and keys and the weighting of the heads"),
    (
        r"a positive factor instead of",
        "scale by a positive constant: a negative or zero one changes what the top-k picks",
    ),
    (r"the top-k takes the smallest", "negate nothing and take the largest scores"),
    (r"the top-k does not run over the keys", "take the top-k over the last dim, the keys"),
    (
        r"its scores are (not \[B, S, T\]|no weighted sum)",
        "write the scores as [B, S, T], a weighted sum over heads of relu(q k)",
    ),
    (r"k is computed", "give the number of picks as a constant (index_topk of the configuration)"),
    (
        r"expected ",
        "write this step as the rule's pattern has it (docs/fusions.md), or replace it by what was expected",
    ),
    # Masks, lengths and positions
    (
        r"make absorbed attention over all keys dearer",
        "nothing to change: for that many queries expanding the cache once takes fewer operations",
    ),
    (
        r"attention over all keys has masks besides a length",
        "hide keys behind one causal length only: position <= length + row",
    ),
    (
        r"the selection is not that of an indexer",
        "let fuse-lightning-indexer match first: kimigraph explain says why not",
    ),
    (
        r"the selection meets other queries",
        "mark the picked keys in a tensor [B, S, T] and use it as it is: row (b, s) for query (b, s), all keys",
    ),
    (r"more than one selection", "let one indexer choose the keys of an attention"),
    (r"the mask differs from head to head", "use one mask [B, 1, S, T] for all heads"),
    (
        r"(the attention has a mask|a mask besides its list|the mask is not of this attention)",
        "hide those keys in the indexer's scores as well, before its top-k, or in neither place",
    ),
    (r"another length than the indexer's", "give indexer and attention the same causal limit"),
    (r"the indexer hides keys that the attention shows", "hide in the attention what the indexer's mask hides"),
    (r"the list is|entries of the list", "give the picks as int32 [B, S, K] with -1 for none, each key at most once"),
    (
        r"(no comparison of positions|positions behind the mask|no(t a)? key position|does not count|"
        r"the limit of the mask|one length|no single length|no integer expression|"
        r"reads a table|computed bound|too far|views cannot)",
        "write the causal mask as a comparison of arange(keys) with the position, one length a sequence",
    ),
    # Attention and the latent cache
    (r"grouped heads, built-in causality or dropout", "give the mask as attn_mask, repeat the heads, no dropout"),
    (
        r"the softmax is not over|a view lies between scores and softmax|no factor of the scores|"
        r"queries, keys and values",
        "write attention as softmax(scale * q k^T + mask) v over [B, H, S, T], or as scaled_dot_product_attention",
    ),
    (r"the scale is not positive", "scale the scores by a positive constant"),
    (
        r"no bias-free linear of a latent|no part of the keys comes from the linear|share rows of the weight|"
        r"more than a latent and a shared part",
        "make keys and values by one bias-free linear of the cached latent (kv_b_proj), plus one shared rope part",
    ),
    (r"latent and rope cache are described differently", "keep both caches in the same layout and type"),
    (
        r"(is not \[|have layout|has .*, wanted|do not make up|a slice is written|"
        r"partly overwritten|a copy broadcasts)",
        "bring the tensor into the layout named, without arithmetic on the way",
    ),
    # Writes of cache rows
    (
        r"the write is not to a described cache",
        "name the cache input in the hints with its descriptor, so that its writes can be named",
    ),
    (
        r"the (cache that is written is a view|write does not run over|write does not take row|"
        r"cache is \S+, not \[B, T, D\])|what is written is",
        "write new rows [B, S, D] into the cache input itself: index_copy_ over its rows, index_put_ at (b, position)",
    ),
    (r"the written cache is paged", "write pages with latent_write or index_key_write, which take the block table"),
    (r"positions that are written do not count up", "write the tokens of a step to consecutive positions"),
    (
        r"latent and rope part are written at different|the other part of the cache is not written",
        "write latent and rope part of a layer once a step, at the same positions, with the widths of their descriptor",
    ),
    (
        r"is used between the writes of latent and rope part",
        "write both parts before either is read",
    ),
    # Indexer and attention as a pair
    (r"the list is no indexer's", "let fuse-lightning-indexer match first: kimigraph explain says why not"),
    (
        r"the picks are expanded from pools",
        "nothing to change in the model: expansion of pooled picks and the open pool stay ATen in this version",
    ),
    (r"the picks are also used as positions", "use the picks in attentions only, or keep both block tables"),
    (
        r"(by different block tables|pages hold \d+ index keys)",
        "give index keys and latents of a layer pages of one size and one block table",
    ),
    (r"more rows than an int32 counts", "keep the cache of one layer below 2**31 rows"),
    (r"share one buffer already|another attention stands for", "nothing to change: the pair reads one list"),
    # Kimi Delta Attention
    (
        r"the new state",
        "write the update as decay * state + key (value - key^T decay * state) beta, in the state's place",
    ),
    (
        r"the (read-out|decayed tensor|state is not)",
        "keep the state [B, H, K, V] or [B, H, V, K] and read the new one out",
    ),
    (r"q, k and v (do not )?come from|SiLU is of", "cut q, k and v out of one short convolution followed by SiLU"),
    (r"new tokens in one step", "compile with --tokens 1: several new tokens a step stay ATen in this version"),
    (
        r"the convolution is not|the cached inputs are no input|its newest column",
        "use a depthwise convolution without bias over the cached columns and the new one, and keep its last column",
    ),
    (r"no static shape", "compile with fixed --batch, --tokens and --context, and no sizes that depend on data"),
    # The input preparation of an indexer
    (
        r"nothing prepares it|no kernel of its own between the input|have no common input",
        "nothing to change: what the layer hands the indexer as it is has no branch to run beside",
    ),
    (
        r"two branches of the indexer's prolog wait for",
        "compute query, index key and head weights by products of their own, without a product or write in common",
    ),
    (r"the prolog takes \S+ from outside", "compile with fixed --batch, --tokens and --context"),
    # Merging
    (rf"{_WORD} waits for {_WORD}", "do not write what both read in between, or let {0} go apart"),
    (r"needs memory of its own", "return or write a copy of it, if one launch less is worth a copy"),
    (r"no multiple of 16 bytes", "make its number of outputs a multiple of 8 (of 4 in float32)"),
    (r"does not pay", "nothing to change in the model; --device-file prices for another device"),
    # Quantization
    (
        r"take different rope parts|the rope part beside",
        "write and read latents and their rope part as one pair of caches",
    ),
    (
        r"the cache .* is (also used by|not \w+ by an operator)",
        "let the step touch the cache in its update and its attention or indexer alone; kimigraph explain says why one "
        "of them is no operator",
    ),
    (r"and .* takes it otherwise", "give all of its operators a block table, or none, as its descriptor says"),
    (r"is no entry of a dict", "hand the caches over in a dict: a call can then go without the rope part"),
    (
        r"are no multiple of the tile|are more than one group of|have no Hadamard rotation",
        "choose another group, or no rotation, for that role in a policy file",
    ),
    (
        r"is no weight of the model as it lies|is read by .*, too|into words of MXFP4|the experts' rows are float16",
        "give experts whole weights of their own in bfloat16, rows of a multiple of 32, or keep the role in the policy",
    ),
    (
        r"its keys are computed from the cache",
        "nothing to change: pooled keys stay as they are in this version, on both sides",
    ),
    # Compaction
    (
        r"compact|^it |how many it picks|its (reshape|length)|another of its|"
        r"a list of all picks|a refused pick|dropped entry|does not refuse",
        "keep the refused entries and mask them, instead of removing them from the tensor",
    ),
)


def remedy_for(reason: str) -> str:
    """The change that would make the rule match, or an empty text."""
    for pattern, remedy in REMEDIES:
        found = re.search(pattern, reason)
        if found is not None:
            return remedy.format(*(group or "" for group in found.groups()))
    return ""
