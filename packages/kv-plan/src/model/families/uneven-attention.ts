import type { AttentionSpec } from "../cache-spec.js";
import { divided, type Family, FLASH_ATTN, layersOf, type ModelDraft } from "../model-draft.js";
import { attentionSpec, everyNthFull, shapeOf, windowsOf } from "./attention.js";

const ATTENTION = "model.layers.*.self_attn.attn";
const all = <T>(layers: number, of: (layer: number) => T): T[] =>
  Array.from({ length: layers }, (_, layer) => of(layer));

/** MiMo V2: windows have their own heads, and K and V differ in size. */
export const mimoV2: Family = {
  name: "MiMo V2",
  read(context): ModelDraft {
    const { fields } = context;
    const shape = shapeOf(context);
    const pattern = fields.perLayer<number>("hybrid_layer_pattern", "number", shape.layers);
    if (pattern === undefined)
      throw fields.unknownValue("hybrid_layer_pattern", null, "a number for each layer is needed");
    // vLLM drops this config's chunk size: the architecture does not use it.
    fields.ignore(
      "attention_chunk_size",
      "add_full_attention_sink_bias",
      "add_swa_attention_sink_bias",
    );
    fields.ignore("sliding_window", "hybrid_block_size");
    divided(
      context,
      fields.count("swa_num_attention_heads", shape.heads),
      "attention heads of windows",
    );
    const full = attentionSpec(context, {
      ...shape,
      headSizeV: fields.count("v_head_dim", shape.headSize),
    });
    const size = fields.count("swa_head_dim");
    const window = attentionSpec(context, {
      kvHeads: fields.count("swa_num_key_value_heads"),
      headSize: size,
      headSizeV: fields.count("swa_v_head_dim", size),
      window: fields.count("sliding_window_size"),
    });
    return {
      numLayers: shape.layers,
      numKvHeads: shape.kvHeads,
      backends: [{ ...FLASH_ATTN, name: "FLASH_ATTN_DIFFKV" }],
      layers: layersOf(shape.layers, (layer) => ({
        [ATTENTION]: pattern[layer] === 1 ? window : full,
      })),
    };
  },
};

/** Llama 4: chunks in layers with positions, full attention in others. */
export const llama4: Family = {
  name: "Llama 4",
  read(context): ModelDraft {
    const { fields } = context;
    const shape = shapeOf(context);
    const every = fields.count("no_rope_layer_interval", 4);
    const rope =
      fields.perLayer<number>("no_rope_layers", "number", shape.layers) ??
      all(shape.layers, (layer) => ((layer + 1) % every === 0 ? 0 : 1));
    fields.ignore("layer_types");
    const said = fields.optionalCount("attention_chunk_size") ?? 8192;
    const chunk = said === 0 ? undefined : said;
    return {
      numLayers: shape.layers,
      numKvHeads: shape.kvHeads,
      backends: [FLASH_ATTN],
      layers: layersOf(shape.layers, (layer) => {
        const spec = attentionSpec(context, {
          ...shape,
          chunk: rope[layer] === 0 ? undefined : chunk,
        });
        return { [ATTENTION]: spec };
      }),
    };
  },
};

/** Nemotron NAS (Llama Nemotron Super): each layer has its own number of heads, or no attention. */
export const nemotronNas: Family = {
  name: "Nemotron NAS",
  read(context): ModelDraft {
    const { fields } = context;
    const layers = fields.layers("num_hidden_layers");
    const heads = fields.count("num_attention_heads");
    divided(context, heads, "attention heads");
    const headSize = fields.count("head_dim", fields.count("hidden_size") / heads);
    fields.ignore("num_key_value_heads", "num_key_value_heads_per_layer");
    const blocks = fields.value("block_configs");
    if (!Array.isArray(blocks) || blocks.length < layers)
      throw fields.unknownValue(
        "block_configs",
        blocks,
        `a block for each of ${layers} layers is needed`,
      );
    const kvHeads = all(layers, (layer): number | undefined => {
      const attention = (blocks[layer] as { attention?: Record<string, unknown> } | null)
        ?.attention;
      const group = attention?.["n_heads_in_group"];
      const isNone = attention?.["no_op"] === true;
      if (
        attention === undefined ||
        attention["replace_with_linear"] === true ||
        attention["sparsify"] ||
        attention["window_length"] ||
        attention["num_sink_tokens"]
      )
        throw fields.unknownValue(
          `block_configs[${layer}]`,
          attention,
          "attention with heads in groups, or none, is known",
        );
      if (isNone) return undefined;
      if (typeof group === "number" && group >= 1 && heads % group === 0) return heads / group;
      throw fields.unknownValue(
        `block_configs[${layer}].attention.n_heads_in_group`,
        group,
        `a divisor of ${heads} is needed`,
      );
    });
    return {
      numLayers: layers,
      numKvHeads: kvHeads.find((count) => count !== undefined) ?? 1,
      backends: [FLASH_ATTN],
      layers: layersOf(layers, (layer) => {
        const count = kvHeads[layer];
        return count === undefined
          ? {}
          : { [ATTENTION]: attentionSpec(context, { kvHeads: count, headSize }) };
      }),
    };
  },
};

/**
 * Gemma 4: full layers have fewer, larger heads. The last layers may share earlier layers' caches.
 */
const gemma4Of = (defaultWindow: number): Family => ({
  name: "Gemma 4",
  read(context): ModelDraft {
    const { fields } = context;
    const shape = shapeOf(context);
    const { layers } = shape;
    const types = [
      ...(fields.perLayer<string>("layer_types", "string", layers) ??
        everyNthFull(context, layers, [null, 6])),
    ];
    types[layers - 1] = "full_attention";
    const windowOf = windowsOf(context, { windows: "types", window: defaultWindow }, layers, types);
    if (fields.value("use_bidirectional_attention") === "all")
      throw fields.unknownValue("use_bidirectional_attention", "all", "causal attention is known");
    fields.ignore("use_bidirectional_attention");
    const headSize = fields.count("global_head_dim", 512);
    const sameKv = fields.flag("attention_k_eq_v", false);
    const global = fields.optionalCount("num_global_key_value_heads");
    const full = { headSize, kvHeads: sameKv && global !== undefined ? global : shape.kvHeads };
    const own = layers - (fields.optionalCount("num_kv_shared_layers") ?? 0);
    return {
      numLayers: layers,
      numKvHeads: shape.kvHeads,
      backends: [FLASH_ATTN],
      layers: layersOf(own, (layer) => {
        const window = types[layer] === "full_attention" ? undefined : windowOf(layer);
        const spec = attentionSpec(context, window === undefined ? full : { ...shape, window });
        return { [ATTENTION]: spec };
      }),
    };
  },
});

export const gemma4 = gemma4Of(512);
export const gemma4Unified = gemma4Of(1024);

/** MiniMax M3: an indexer's keys beside sparse layers' attention. */
export const minimaxM3: Family = {
  name: "MiniMax M3",
  read(context): ModelDraft {
    const { fields } = context;
    const shape = shapeOf(context);
    const sparse = fields.object("sparse_attention_config");
    const frequency = sparse?.perLayer<number>("sparse_attention_freq", "number", shape.layers);
    const spec = attentionSpec(context, shape);
    if (sparse === undefined || frequency === undefined)
      throw fields.unknownValue(
        "sparse_attention_config.sparse_attention_freq",
        null,
        "a number for each layer is needed",
      );
    const keys: Omit<AttentionSpec, "blockSize"> = {
      class: "MLAAttentionSpec",
      numKvHeads: 1,
      headSizeV: 0,
      role: "indexer",
      headSize: sparse.count("sparse_index_dim"),
      dtype: context.modelDtype,
      kernelBlock: SPARSE_BLOCK_TOKENS,
    };
    const tokens = sparse.count("sparse_block_size", SPARSE_BLOCK_TOKENS);
    if (tokens !== SPARSE_BLOCK_TOKENS)
      throw sparse.unknownValue("sparse_block_size", tokens, `${SPARSE_BLOCK_TOKENS} is known`);
    // The choice among the keys, and two fields that vLLM does not read.
    sparse.ignore(
      "sparse_num_index_heads",
      "sparse_topk_blocks",
      "sparse_score_type",
      "sparse_init_block",
    );
    sparse.ignore("sparse_local_block", "use_sparse_attention", "sparse_disable_index_value");
    sparse.refuseUnread(context.architecture);
    return {
      numLayers: shape.layers,
      numKvHeads: shape.kvHeads,
      backends: [
        FLASH_ATTN,
        { name: "MINIMAX_M3_SPARSE", kernelTokens: SPARSE_BLOCK_TOKENS, only: true },
      ],
      layers: layersOf(shape.layers, (layer) => {
        const name = ATTENTION;
        if (frequency[layer] === 0) return { [name]: spec };
        return {
          [`${name}.index_cache`]: keys,
          [name]: { ...spec, kernelBlock: SPARSE_BLOCK_TOKENS },
        };
      }),
    };
  },
};

const SPARSE_BLOCK_TOKENS = 128;

/** Whisper: a decoder layer caches its own tokens and the encoder's. */
export const whisper: Family = {
  name: "Whisper",
  read(context): ModelDraft {
    const { fields } = context;
    const layers = fields.layers("decoder_layers");
    const heads = fields.count("decoder_attention_heads");
    divided(context, fields.count("encoder_attention_heads"), "attention heads");
    divided(context, heads, "attention heads");
    const shape = { kvHeads: heads, headSize: fields.count("d_model") / heads };
    fields.ignore("encoder_layers", "encoder_ffn_dim", "decoder_ffn_dim");
    fields.ignore(
      "encoder_layerdrop",
      "decoder_layerdrop",
      "decoder_start_token_id",
      "forced_decoder_ids",
    );
    fields.ignore("num_attention_heads");
    return {
      numLayers: layers,
      numKvHeads: heads,
      backends: [FLASH_ATTN],
      notHandedOver:
        "it is an encoder-decoder: the cache of its cross attention is the encoder's, which a decode engine computes itself from the request's audio",
      layers: layersOf(layers, () => ({
        ".decoder.layers.*.layers.self_attn.attn": attentionSpec(context, shape),
        ".decoder.layers.*.layers.encoder_attn.attn": attentionSpec(context, {
          ...shape,
          cross: true,
        }),
      })),
    };
  },
};
