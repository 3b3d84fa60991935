import { readFileSync } from "node:fs";
import { join } from "node:path";
import { EXIT_CODES } from "@kv/program";
import { scratchFolder } from "@kv/testing/scratch-folder";
import { describe, expect, test } from "vitest";
import { planFromDocument } from "../src/data/index.js";
import {
  captured,
  complaint,
  engine,
  model,
  PAIR,
  planned,
  refused,
  region,
  report,
  written,
} from "./captured-run.js";

const folder = scratchFolder();

const fileOf = (name: string, content: unknown) => written(join(folder, name), content);
/** The file of a model's config with other fields. */
const changed = (name: string, change: object) =>
  fileOf("changed.json", { ...JSON.parse(readFileSync(model(name), "utf8")), ...change });

/**
 * Tokens in a block of Gemma 4's groups at TP 2: a window's page is twice as large as a full
 * layer's.
 */
const GEMMA_4_BLOCKS = [16, 16, 16, 16, 16, 32];

describe("models by their published shapes", () => {
  // Bytes by hand: tokens x layers x (K and V) x head size x 2 bytes x heads that are moved.
  test.each<[string, string[], { regions: number; lengthBytes: number; sources: number[][] }]>([
    [
      "qwen3-0.6b",
      ["--tp 1 --tp 2"],
      { regions: 28, lengthBytes: 2048 * 28 * 2 * 128 * 2 * 8, sources: [[0], [0]] },
    ],
    [
      "llama-3.1-70b",
      ["--tp 8 --tp 4"],
      {
        regions: 80,
        lengthBytes: 2048 * 80 * 2 * 128 * 2 * 8,
        sources: [
          [0, 1],
          [2, 3],
          [4, 5],
          [6, 7],
        ],
      },
    ],
    [
      "llama-3.1-70b",
      ["--tp 2 --tp 4 --block-size 16 --block-size 32"],
      { regions: 80, lengthBytes: 2048 * 80 * 2 * 128 * 2 * 8, sources: [[0], [0], [1], [1]] },
    ],
    [
      "deepseek-v2-lite",
      ["--tp 2 --tp 1"],
      { regions: 27, lengthBytes: 2048 * 27 * 576 * 2, sources: [[0]] },
    ],
    [
      "deepseek-v3",
      ["--tp 8 --tp 2"],
      // Each decode rank holds the whole latent cache.
      { regions: 61, lengthBytes: 2 * 2048 * 61 * 576 * 2, sources: [[0], [4]] },
    ],
  ])("%s %j", async (name, args, expected) => {
    const found = await planned(`--config ${model(name)}`, ...args);
    expect(found.prefill.regions).toBe(expected.regions);
    expect(found.request.lengthBytes).toBe(expected.lengthBytes);
    expect(found.ranks.map((rank) => rank.reads.map((read) => read.prefillRank))).toEqual(
      expected.sources,
    );
  });

  test("a draft's caches are handed over beside the model's", async () => {
    const head = fileOf("head.json", {
      architectures: ["LlamaForCausalLMEagle3"],
      model_type: "llama",
      hidden_size: 8192,
      num_attention_heads: 64,
      num_key_value_heads: 8,
      num_hidden_layers: 1,
      draft_vocab_size: 32_000,
      eagle_aux_hidden_state_layer_ids: [2, 40, 77],
    });
    const flags = [`--config ${model("llama-3.1-70b")} --tp 8 --tp 4`];
    const found = await planned(...flags, `--draft ${head} --draft-tokens 3`);
    expect(found.prefill.regions).toBe(81);
    expect(found.request.lengthBytes).toBe(2048 * 81 * 2 * 128 * 2 * 8);
    expect(found.plannedFrom).toContain("with a draft");
    const two = await refused(...flags, `--draft ${fileOf("other.json", {})}`);
    expect(two.reason).toContain("a draft with the architecture that its file lacks is not known");
    const predicted = await planned(`--config ${model("deepseek-v3.2")} --tp 8 --draft mtp`);
    expect(predicted.prefill.regions).toBe(124);
  });

  test("gpt-oss: sliding-window layers move only the window's blocks", async () => {
    const found = await planned(`--config ${model("gpt-oss-20b")} --tp 1 --tokens 2048`);
    expect(found.groups).toEqual(["swa", "full"]);
    // 2048 tokens in full, and of the window of 128 tokens 8 blocks and the one it begins in.
    expect(found.request.lengthBytes).toBe((2048 + 9 * 16) * 12 * 2 * 64 * 2 * 8);
  });

  test("Gemma 3: a full layer in six, groups of equal size", async () => {
    const found = await planned(`--config ${model("gemma-3-1b")} --tp 1 --tp 2`);
    expect(found.groups.filter((kind) => kind === "full")).toHaveLength(1);
    expect(found.groups.filter((kind) => kind === "swa")).toHaveLength(6);
    expect(found.prefill.regions).toBe(4);
  });

  test("DeepSeek V3.2: an indexer's keys beside each layer's latents, in one group", async () => {
    const flags = [`--config ${model("deepseek-v3.2")} --tp 8 --tp 4`];
    const found = await planned(...flags);
    expect(found.groups).toEqual(["mla"]);
    expect(found.prefill).toMatchObject({ regions: 122, blockSize: 64 });
    // Each of 4 decode ranks: latents of 512 + 64 elements, keys of 128 bytes with a scale of 4.
    expect(found.request.lengthBytes).toBe(4 * 2048 * 61 * (576 * 2 + 132));
    const packed = await planned(...flags, "--kv-cache-dtype fp8");
    expect(packed.request.lengthBytes).toBe(4 * 2048 * 61 * (656 + 132));
    expect(packed.prefill.caches?.map((cache) => [cache.layers, cache.usedBytes / 64])).toEqual([
      [61, 132],
      [61, 656],
    ]);
  });

  test("an indexer's keys of fewer elements than share a scale have none", async () => {
    const file = changed("deepseek-v3.2", { index_head_dim: 64 });
    const { stdout } = await captured(`--config ${file} --tp 1 --plans`);
    const [first = ""] = stdout.split("\n");
    const { regions } = JSON.parse(first).local as {
      regions: { name: string; blockLengthBytes: number; cellBytes?: number }[];
    };
    const keys = regions.find(({ name }) => name.endsWith("k_cache"));
    expect(keys).toMatchObject({ blockLengthBytes: 64 * 64, cellBytes: 64 });
  });

  // What cache_specs.py prints for these two with VLLM_KV_CACHE_LAYOUT=BLHNC.
  test("a layout with blocks outermost: rows padded for the kernels, and no groups that vLLM would not make", async () => {
    const rows = await planned(`--config ${model("deepseek-v3.2")} --tp 1 --layout BLHNC`);
    expect(rows.prefill.regions).toBe(1);
    expect(rows.prefill.bytesPerRank).toBe(5_013_504 * 10_000);
    const other = await report(`--config ${model("gemma-4-31b")} --tp 1 --layout BLHNC`);
    expect(other).toMatchObject({ outcome: "refused", code: "KV_PLAN_UNSUPPORTED" });
  });

  test("DeepSeek V4 Flash: windows, latents of 4 and of 128 tokens, indexers, and compressors' states in rows", async () => {
    const flags = [`--config ${model("deepseek-v4-flash")} --tokens 8192 --tp 8 --tp 1`];
    const found = await planned(...flags);
    expect(found.groups).toEqual(["swa-mla", "swa-mla", "mla", "swa-mla", "swa-mla"]);
    // vLLM's connector registers whole rows: a page of each of 21 indexers, 21 and 20 latents,
    // padded to multiples of 576 bytes.
    expect([found.decode.regions, found.decode.layout]).toEqual([1, "BLHNC"]);
    const row = 21 * 8640 + 21 * 37_440 + 20 * 1728;
    // Blocks of two groups of windows of 128 tokens in blocks of 64, and of latents, compressors'
    // states of 8 and of 128 tokens.
    const blocks = 2 * (128 / 64 + 1) + 8192 / 256 + (8 / 4 + 1) + (128 / 8 + 1);
    expect(found.request.lengthBytes).toBe(row * blocks);
    expect(found.plannedFrom).toContain("vLLM 0.33's rules for DeepseekV4ForCausalLM");
  });

  test("Nemotron 3 Nano 30B: states in attention pages, in blocks that vLLM derives for each TP size", async () => {
    const flags = [`--config ${model("nemotron-3-nano-30b")} --tp 4 --tp 1`];
    const state = (3 * (64 * 64 + 2 * 8 * 128) * 2 + 64 * 64 * 128 * 4) * 23;
    const found = await planned(...flags, "--kv-cache-dtype fp8");
    expect([found.prefill.blockSize, found.decode.blockSize]).toEqual([2096, 4176]);
    expect(found.groups).toEqual(["mamba", "mamba", "mamba", "mamba", "full"]);
    expect(found.request.lengthBytes).toBe(2048 * 6 * 2 * 128 * 2 + state);
    expect(found.assumed).toContain(
      "--block-size 2096,4176: the fewest tokens whose page holds a state",
    );
    const half = await planned(...flags, "--ssm-dtype bfloat16");
    expect(half.request.lengthBytes).toBe(
      2048 * 6 * 2 * 128 * 2 * 2 + (3 * (64 * 64 + 2 * 8 * 128) * 2 + 64 * 64 * 128 * 2) * 23,
    );
  });

  test("vllm#54387: the report names the layout of states that vLLM's connector asks for", async () => {
    const { stdout } = await captured(
      `--config ${model("nemotron-3-nano-30b")} --tp 4 --tokens 16`,
    );
    expect(stdout).toContain("VLLM_SSM_CONV_STATE_LAYOUT=DS");
  });

  test("Nemotron 3 Nano 30B: the report has the kinds of caches apart, with the bytes of the request", async () => {
    const flags = [`--config ${model("nemotron-3-nano-30b")} --tp 1 --tokens 16`];
    const found = await planned(...flags);
    // A request has one state in each of its layers, and a block of attention for 16 tokens.
    const state = (3 * (64 * 64 + 2 * 8 * 128) * 2 + 64 * 64 * 128 * 4) * 23;
    expect(found.kinds.map(({ name, layers }) => [name, layers])).toEqual([
      ["states", 23],
      ["full attention", 6],
    ]);
    expect(found.kinds[0]?.requestBytes).toBe(state);
    expect(found.kinds[1]?.requestBytes).toBe(found.decode.blockSize * 6 * 2 * 2 * 128 * 2);
    const { stdout } = await captured(...flags);
    expect(stdout).toMatch(
      /on a decode rank: [\d.]+ MiB states \(23 layers\), [\d.]+ MiB full attention \(6 layers\)/,
    );
  });

  test("Nemotron 3 Nano 30B: a block too small for a state is raised, as vLLM raises it", async () => {
    const flags = [`--config ${model("nemotron-3-nano-30b")} --tp 4`];
    const found = await planned(...flags, "--block-size 64 --tokens 16");
    expect(found.prefill.blockSize).toBe(1088);
    expect(found.assumed.join()).toContain(
      "--block-size 1088,1088 instead of 64,64: vLLM raises it",
    );
    expect((await planned(...flags, "--block-size 4096 --tokens 16")).prefill.blockSize).toBe(4096);
  });

  test("Gemma 4 31B: groups of windows and full layers share ten regions, in blocks of 16 and 32 tokens", async () => {
    const found = await planned(`--config ${model("gemma-4-31b")} --tp 2 --tp 4`);
    expect(found.groups).toEqual(["swa", "swa", "swa", "swa", "swa", "full"]);
    expect(found.prefill.regions).toBe(10);
    expect(found.prefill.groupBlockTokens).toEqual(GEMMA_4_BLOCKS);
    // 50 layers with a window of 1024 tokens, 16 heads of 256; 10 full ones, 4 heads of 512.
    const window = GEMMA_4_BLOCKS[0] as number;
    const full = GEMMA_4_BLOCKS[5] as number;
    expect(found.request.lengthBytes).toBe(
      50 * (1024 / window + 1) * window * 16 * 2 * 256 * 2 +
        10 * Math.ceil(2048 / full) * full * 4 * 2 * 512 * 2,
    );
    const plans = await captured(`--config ${model("gemma-4-31b")} --tp 2 --plans`);
    const [first = ""] = plans.stdout.split("\n");
    expect(
      JSON.parse(first).groupPlans.map(
        (group: { localBlockTokens: number }) => group.localBlockTokens,
      ),
    ).toEqual(GEMMA_4_BLOCKS);
  });

  test("reports values that neither the config nor a flag gives as assumed", async () => {
    const found = await planned(`--config ${model("llama-3.1-70b")} --tp 1`);
    expect(found.assumed).toContain("--block-size 16");
    expect(found.assumed).toContain("head_dim is missing: hidden_size / num_attention_heads");
    const said = await planned(`--config ${model("llama-3.1-70b")} --tp 1 --block-size 16`);
    expect(said.assumed).not.toContain("--block-size 16");
  });
});

test("takes the model shape from flags without a config", async () => {
  const flags = ["--layers 2 --kv-heads 4 --head-size 8 --kv-cache-dtype fp8"];
  const found = await planned(...flags, "--tp 2 --tp 1 --tokens 100 --block-size 16,32");
  expect(found.request.lengthBytes).toBe(112 * 2 * 2 * 8 * 4);
  expect(found.form).toBe("permute");
  expect(found.ranks[0]).toMatchObject({ permutedBlocks: 4, zeroedBlocks: 1 });
  const mla = await planned("--layers 3 --mla --head-size 576 --tp 2 --tp 1 --tokens 16");
  expect(mla.request.lengthBytes).toBe(16 * 3 * 576 * 2);
  expect(mla.ranks[0]?.notifyOnly).toEqual([{ prefillRank: 1, prefillStage: 0 }]);
});

test("a fragmented pool has more merged descriptors than a consecutive one, and fewer than blocks", async () => {
  const flags = [`--config ${model("qwen3-0.6b")} --tp 1`];
  const [one, other] = [await planned(...flags), await planned(...flags, "--pool fragmented")];
  expect(one.request).toMatchObject({ descriptors: 28 * 128, merged: 28 });
  expect(other.request).toMatchObject({ descriptors: 28 * 128, merged: 28 * 32 });
  expect(other.request.transferMs).toBeCloseTo(other.request.lengthBytes / 25e6, 6);
});

test("vllm#55434: the report counts the descriptors that a rank posts, what they take, and what would be fewer", async () => {
  const { stdout } = await captured(`--config ${model("qwen3-0.6b")} --tp 1`);
  expect(stdout).toContain(
    "D0 posts 3,584 descriptors. NIXL merges neighbours: 28 in pools in order, 896 in pools in stretches of 4 blocks, 3,584 in scattered pools",
  );
  expect(stdout).toContain("posting over UCX: 0.039 ms, scattered 5 ms (1.4 µs each: ");
  expect(stdout).toContain("posting over LIBFABRIC: 0.067 ms, scattered 8.6 ms (2.4 µs each: ");
  expect(stdout).toContain("fewer with --block-size 32: 1,792 descriptors, 28 after merging");
});

test("vllm#55434: a pair that a file describes, whose layouts cut each block by token, has fewer with heads outermost", async () => {
  const layout = "LBNHC";
  const sides = { prefill: engine(2, { layout }), decode: engine(1, { layout }) };
  const file = fileOf("posting.json", { ...PAIR, ...sides });
  const { posting } = await planned(`--file ${file} --tokens 64 --permute --form direct`);
  // Four blocks of 16 tokens, each token from two ranks.
  expect(posting).toMatchObject({ descriptors: 128, merged: 128 });
  expect(posting.fewer[0]).toEqual({
    change: "layout LBHNC on both sides",
    descriptors: 8,
    merged: 8,
  });
});

test("takes the layouts and backends of both engines from flags", async () => {
  const flags = ["--layers 1 --kv-heads 2 --head-size 8 --tokens 32"];
  const found = await planned(
    ...flags,
    "--layout HND,NHD --backend FLASH_ATTN,TRITON_ATTN --repack",
  );
  expect([found.prefill.layout, found.decode.layout]).toEqual(["LBHNC", "LBNHC"]);
  expect([found.prefill.attentionBackend, found.decode.attentionBackend]).toEqual([
    "FLASH_ATTN",
    "TRITON_ATTN",
  ]);
});

test("the form can be chosen, and the report gives the reason for it", async () => {
  const flags = [`--config ${model("qwen3-0.6b")} --tp 1 --block-size 16,32`];
  expect((await planned(...flags, "--form permute")).form).toBe("permute");
  const direct = await planned(...flags, "--form direct");
  expect(direct.form).toBe("direct");
  expect(direct.ranks[0]).toMatchObject({ permutedBlocks: 0 });
  expect(direct.formReason).not.toBe("");
});

test("reports how many notifications each prefill rank waits for, and from which ranks", async () => {
  const found = await planned(`--config ${model("qwen3-0.6b")} --tp 2 --tp 8`);
  expect(found.notifications).toEqual([
    { prefillRank: 0, prefillStage: 0, heads: [0, 4], awaits: 4, from: [0, 1, 2, 3] },
    { prefillRank: 1, prefillStage: 0, heads: [4, 8], awaits: 4, from: [4, 5, 6, 7] },
  ]);
});

describe("a pair that is refused", () => {
  test("reports the reason and working changes, and exits with 2", async () => {
    const args = [`--config ${model("llama-3.1-70b")} --tp 8 --tp 4 --layout LHBNC`];
    const { code, stdout } = await captured(...args);
    expect(code).toBe(EXIT_CODES.failed);
    expect(stdout).toContain(
      'refused: region "model.layers.0.self_attn.attn": blocks must be split by head, and the layout does not keep heads together: local 2 heads, LHBNC, remote 1 heads, LHBNC [KV_PLAN_UNSUPPORTED]',
    );
    const found = await refused(...args);
    expect(found.wouldWork).toEqual(
      expect.arrayContaining([
        "the layout LBHNC (HND) on both sides",
        "decode with TP 8",
        "prefill with TP 4",
      ]),
    );
    expect(found.wouldWork).not.toContain("decode with TP 2");
  });

  test("each proposed change leads to a plan", async () => {
    const base = "--layers 2 --kv-heads 6 --head-size 8";
    const found = await refused(`${base} --tp 4 --tp 6`);
    expect(found.wouldWork).toContain("prefill with TP 6");
    for (const change of found.wouldWork) {
      const [, side, size] = /^(decode|prefill) with TP (\d+)$/.exec(change) ?? [];
      if (side === undefined) continue;
      const sizes = side === "decode" ? `4,${size}` : `${size},6`;
      expect((await report(`${base} --tp ${sizes}`)).outcome).toBe("planned");
    }
  });

  test("proposes TP sizes that divide the heads", async () => {
    const base = "--layers 2 --kv-heads 8 --head-size 64";
    const found = await refused(`${base} --tp 2,3`);
    expect(found.wouldWork).toEqual([
      "decode with TP 2",
      "decode with TP 1",
      ...[4, 8, 16].map((size) => `decode with TP ${size}`),
    ]);
    const both = await refused(`${base} --tp 3`);
    expect(both.reason).toContain("8 KV heads cannot be split over TP size 3");
    expect(both.wouldWork).toEqual([1, 2, 4, 8, 16].map((size) => `TP ${size} on both sides`));
  });

  test("refuses configs of two different models", async () => {
    const two = `--config ${model("qwen3-0.6b")} --config ${model("llama-3.1-70b")}`;
    expect(await complaint(two)).toContain(
      "differ in layers with a cache: prefill 28, decode 80 [KV_PLAN_INCOMPATIBLE]",
    );
  });

  test("refuses a config with an unknown compression ratio", async () => {
    const file = changed("deepseek-v4-flash", { compress_ratios: new Array(43).fill(16) });
    const { code, stdout } = await captured(`--config ${file} --tp 8`);
    expect(code).toBe(EXIT_CODES.failed);
    expect(stdout).toMatch(
      /compress_ratios is \[16\]; 0, 1, 4 and 128 are known.*\[KV_PLAN_UNSUPPORTED\]\n {2}.*--file/,
    );
  });

  test("field.md C9: heads that a TP size does not divide are the reason, on either side", async () => {
    for (const tp of ["6,2", "2,6"]) {
      const found = await refused(`--layers 2 --kv-heads 8 --head-size 64 --tp ${tp}`);
      expect(found.reason).toContain("8 KV heads cannot be split over TP size 6");
      expect(found.wouldWork).toContain(tp === "6,2" ? "prefill with TP 2" : "decode with TP 2");
    }
  });

  test("field.md 2: an unknown field that may decide a cache ends with exit code 1 and its name", async () => {
    const llama = readFileSync(changed("llama-3.1-70b", { mamba_d_state: 16 }), "utf8");
    const file = fileOf("unknown.json", llama.replace("{", '{"rope_limit": Infinity, '));
    const { code, stdout } = await captured(`--config ${file} --tp 8`);
    expect(code).toBe(EXIT_CODES.failed);
    expect(stdout).toContain(
      "refused: unknown: mamba_d_state (16): a field that may decide the KV cache",
    );
    expect(stdout).not.toContain("proven");
  });
});

describe("cache types whose scales lie apart (vllm#52516)", () => {
  const llama = [`--config ${model("llama-3.1-70b")} --kv-cache-dtype`];

  test("nvfp4 is refused where heads would be split, and planned at equal TP sizes", async () => {
    const found = await refused(...llama, "nvfp4", "--tp 4 --tp 8");
    expect(found.code).toBe("KV_PLAN_UNSUPPORTED");
    expect(found.reason).toContain(
      'split by head, and blocks of cache dtype "nvfp4" do not keep heads and tokens apart',
    );
    expect(found.wouldWork).toEqual(
      expect.arrayContaining(["decode with TP 4", "prefill with TP 8"]),
    );
    const equal = await planned(...llama, "nvfp4", "--tp 8");
    // Half a byte of data and a sixteenth of scales for each element.
    expect(equal.request.lengthBytes).toBe(2048 * 80 * 8 * 2 * (64 + 8));
    expect([equal.form, equal.uncovered, equal.proof.proven]).toEqual(["copy", "masked", true]);
  });

  test("types with a scale in each cell are split, and count its bytes", async () => {
    const cells = async (type: string) =>
      (await planned(...llama, type, "--tp 4 --tp 8")).request.lengthBytes / (2048 * 80 * 8 * 2);
    expect(await cells("fp8_per_token_head")).toBe(128 + 4);
    expect(await cells("int4_per_token_head")).toBe(64 + 4);
    const other = await captured(...llama, "nvfp2", "--tp 8");
    expect(other.stderr).toContain(
      'dtype "nvfp2" is none of bfloat16, float16, fp8, fp8_e4m3, fp8_e5m2, nvfp4, nvfp4',
    );
    expect((await captured(...llama, "constructor")).stderr).toContain(
      'dtype "constructor" is none of',
    );
  });

  test("an indexer's keys and packed latents are not cut by token", async () => {
    const sizes = ["--tp 8 --block-size 64,128 --kernel-block-size 64,128"];
    for (const type of ["auto", "fp8"]) {
      const found = await refused(
        `--config ${model("deepseek-v3.2")}`,
        ...sizes,
        `--kv-cache-dtype ${type}`,
      );
      expect(found.code).toBe("KV_PLAN_UNSUPPORTED");
      expect(found.reason).toContain("different sizes must be cut by token, and");
    }
  });

  test("a file may name the type, and the cells of regions that are padded", async () => {
    const typed = (cacheDtype: string, cellBytes: number) => {
      const side = (tpSize: number) =>
        engine(tpSize, {
          regions: [region(tpSize, { blockLengthBytes: 9216 / tpSize, cellBytes })],
        });
      const sides = { prefill: side(1), decode: side(2) };
      return report(`--file ${fileOf("dtype.json", { ...PAIR, cacheDtype, ...sides })}`);
    };
    expect(await typed("auto", 144)).toMatchObject({ outcome: "planned" });
    expect(await typed("auto", 128)).toHaveProperty(
      "reason",
      expect.stringMatching(/9216 bytes is not|4608 bytes is not/),
    );
    expect(await typed("nvfp4", 144)).toHaveProperty(
      "reason",
      expect.stringContaining('cache dtype "nvfp4"'),
    );
  });
});

describe("a file", () => {
  test("describes a pair region by region", async () => {
    const found = await planned(`--file ${fileOf("pair.json", PAIR)} --tokens 64`);
    expect(found.title).toBe("two small engines");
    expect(found.request.lengthBytes).toBe(64 * 64 * 4);
    expect(found.ranks[0]?.heads).toEqual([0, 4]);
  });

  test("field.md 2: describes the states of a hybrid", async () => {
    const hybrid = (tpSize: number) =>
      engine(tpSize, {
        stateSpace: {
          convProjectionBytes: [96, 32, 32].map((bytes) => bytes / tpSize),
          convBytes: 160 / tpSize,
          recurrentBytes: 2048 / tpSize,
        },
        regions: [region(tpSize, { groupId: -1 })],
      });
    const sides = { prefill: hybrid(2), decode: hybrid(1) };
    const file = fileOf("hybrid.json", { ...PAIR, groups: ["mamba", "full"], ...sides });
    const found = await planned(`--file ${file} --tokens 64`);
    // One state, and 64 tokens of attention.
    expect(found.request.lengthBytes).toBe(160 + 2048 + 64 * 64 * 4);
    expect(found.plannedFrom).toMatch(/^the file .*hybrid\.json$/);
  });

  test("uses a region's own number of heads", async () => {
    const change = (tpSize: number) => ({ blockLengthBytes: 8192 / tpSize, numKvHeads: 8 });
    const eight = (tpSize: number) => engine(tpSize, { regions: [region(tpSize, change(tpSize))] });
    const found = await planned(
      "--file",
      fileOf("eight.json", { ...PAIR, prefill: eight(2), decode: eight(1) }),
    );
    expect(found.ranks[0]?.heads).toEqual([0, 8]);
  });

  test.each<[string, unknown, string]>([
    ["not JSON", "{", "is not JSON"],
    ["another version", { ...PAIR, version: 2 }, "version"],
    [
      "an unknown member",
      { ...PAIR, prefill: engine(2, { more: 1 }) },
      'prefill: there is no key "more',
    ],
    [
      "first-contact.md 3: a misspelt member, and the nearest,",
      { ...PAIR, prefill: engine(2, { ppSiz: 1 }) },
      'prefill: there is no key "ppSiz", did you mean ppSize?',
    ],
    ["an unknown cache kind", { ...PAIR, groups: ["new"] }, "groups.0"],
    [
      "more ranks than any engine has",
      { ...PAIR, prefill: engine(2, { ppSize: 513 }) },
      "1026 ranks",
    ],
    ["no region", { ...PAIR, decode: engine(1, { regions: [] }) }, "decode.regions"],
    [
      "a fractional length",
      { ...PAIR, decode: engine(1, { kernelBlockSize: 0.5 }) },
      "decode.kernelBlockSize",
    ],
  ])("refuses %s", async (_what, content, message) => {
    const said = await complaint(`--file ${fileOf("bad.json", content)}`);
    expect(said).toContain(message);
    expect(said).toContain("[KV_CONFIG_INVALID]");
  });
});

test.each<[string, string[], string]>([
  ["no input", [], "none is given"],
  [
    "a layout that is a name of each object",
    [`--config ${model("qwen3-0.6b")} --layout constructor`],
    "must be HND, NHD or one of",
  ],
  ["two inputs", [`--config ${model("qwen3-0.6b")} --layers 3`], "--config and --layers are given"],
  [
    "a flag that has no effect",
    ["--file x.json --block-size 16"],
    "--block-size has no effect with --file",
  ],
  [
    "a shape flag together with a config",
    [`--config ${model("qwen3-0.6b")} --kv-heads 3`],
    "--kv-heads has no effect with --config",
  ],
  [
    "flags for shapes together with a config",
    [`--config ${model("qwen3-0.6b")} --head-size 3 --mla`],
    "--head-size, --mla has no effect",
  ],
  [
    "a dtype flag together with a file",
    ["--file x.json --kv-cache-dtype fp8 --tp 2"],
    "--tp, --kv-cache-dtype has no effect with --file",
  ],
  [
    "KV heads together with --mla",
    ["--layers 1 --mla --head-size 8 --kv-heads 2"],
    "--kv-heads has no effect with --mla",
  ],
  [
    "a draft beside pipeline stages",
    [`--config ${model("qwen3-0.6b")} --pp 2 --draft mtp`],
    "--draft beside --pp",
  ],
  [
    "a state dtype for a model without states",
    [`--config ${model("qwen3-0.6b")} --ssm-dtype float32`],
    "--ssm-dtype float32 has no effect: no layer",
  ],
  [
    "more ranks than any engine has",
    [`--config ${model("qwen3-0.6b")} --tp 512 --pp 4`],
    "make 2048 ranks, more than 1024",
  ],
  ["three sizes", [`--config ${model("qwen3-0.6b")} --tp 1,2,4`], "--tp is given 3 times"],
  ["a missing file", ["--file /nowhere/pair.json"], "/nowhere/pair.json cannot be read"],
  ["two forms", [`--config ${model("qwen3-0.6b")} --json --svg`], "the report has one form"],
  [
    "a kernel block that does not divide",
    [`--config ${model("qwen3-0.6b")} --block-size 48 --kernel-block-size 32`],
    "not a multiple",
  ],
  ["running engines", ["--from p:5600 --from=d:5600"], "kv-peer plan --from PREFILL:5600"],
  ["an incomplete shape", ["--layers 3"], "--layers needs --head-size and --kv-heads"],
  [
    "a pool that is too small",
    [`--config ${model("qwen3-0.6b")} --num-blocks 3`],
    "too small for a request of 2048 tokens",
  ],
])("refuses %s", async (_what, args, message) => {
  const { code, stdout, stderr } = await captured(...args);
  expect(code).not.toBe(0);
  expect(stderr + stdout).toMatch(message);
});

test.each([
  "--tp 0",
  "--tp x",
  "--tp 1025",
  "--pp 1,1025",
  "--layout HND,ABC",
  "--layout ABC",
  "--bandwidth -1",
  "--pool full",
  "--nonsense",
])("the command line refuses %j by itself", async (flags) => {
  expect(await complaint(`--config ${model("qwen3-0.6b")} ${flags}`)).toMatch(
    /^kv-plan: .+ \[KV_CONFIG_INVALID\]$/m,
  );
});

describe("forms", () => {
  const flags = [`--config ${model("deepseek-v2-lite")} --tp 4 --tp 2`];

  test("text lists the proven statements", async () => {
    const { code, stdout } = await captured(...flags);
    expect(code).toBe(0);
    expect(stdout).toMatch(/D0 +latent +P0 +latent +27 /);
    expect(stdout).toMatch(/P1 +1 +D0/);
    expect(stdout).toMatch(/^proven +\d+ blocks of 1 request/m);
  });

  test("SVG says how many ranks it does not draw", async () => {
    const { stdout } = await captured(
      "--layers 2 --kv-heads 8 --head-size 64 --tp 128,1 --tokens 32 --svg",
    );
    expect(stdout.match(/<g class="rank"/g)).toHaveLength(65);
    expect(stdout).toContain("Not drawn: 64 of 128 prefill ranks.");
  });

  test("SVG is well-formed and has a box per rank and a curve per read and notification", async () => {
    const { stdout } = await captured(...flags, "--svg");
    expect(stdout.match(/<g class="rank"/g)).toHaveLength(6);
    expect(stdout.match(/<path class="edge/g)).toHaveLength(4);
    expect(stdout).not.toMatch(/<script|href/);
  });

  test("--plans prints plans that can be read again, --out writes to a file", async () => {
    const out = join(folder, "plans.jsonl");
    const { code, stdout } = await captured(...flags, `--plans --out ${out}`);
    expect([code, stdout]).toEqual([0, ""]);
    const plans = readFileSync(out, "utf8")
      .trim()
      .split("\n")
      .map((line) => planFromDocument(JSON.parse(line)));
    expect(plans.map((plan) => plan.local.tpRank)).toEqual([0, 1]);
  });
});
