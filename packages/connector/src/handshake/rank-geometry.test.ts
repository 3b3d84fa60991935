import { createRanks } from "@kv/conformance/engine/ranks";
import { type KvCacheConfig, KvError } from "@kv/interface";
import { buildEngineTransferPlan, planRequest, type RankGeometry } from "@kv/plan";
import { provePlan } from "@kv/plan/prove";
import { type AgentMetadata, decodeAgentMetadata, encodeAgentMetadata } from "@kv/protocol";
import { simConfig } from "@kv/testing/simulator/sim-options";
import { memoryTransport } from "@kv/transport-memory";
import { describe, expect, it } from "vitest";
import { describeRank, localGeometry, modelGeometry, remoteGeometry } from "./rank-geometry.js";

const rank = { tpRank: 0, tpSize: 1 };
function cachesOf(config = simConfig(16)) {
  const transport = memoryTransport();
  const [caches] = createRanks({ transport, config, tpSize: 1, numBlocks: 4 }).caches;
  const [region] = caches?.regions ?? [];
  if (caches === undefined || region === undefined) throw new Error("no rank");
  return { caches, region };
}
const local = () => localGeometry(cachesOf().caches, rank);

const described = (geometry: RankGeometry) =>
  describeRank(geometry, { engineId: "e", agentMetadata: new Uint8Array([1]) });

describe("rank geometry", () => {
  it("is the same after a handshake has encoded and decoded it", () => {
    const here = local();
    const told = decodeAgentMetadata(encodeAgentMetadata(described(here)));
    expect(remoteGeometry(told, rank, here)).toEqual(here);
  });

  it("takes fields that an older peer leaves out from the local geometry", () => {
    const here = local();
    const { regionNumBlocks, regionGroupIds, regionNames, regionMemoryTypes, ...old } =
      described(here);
    expect([regionNumBlocks, regionGroupIds, regionNames, regionMemoryTypes]).not.toContain(
      undefined,
    );
    expect(remoteGeometry(old, rank, here)).toEqual(here);
  });

  it("matches a pipeline stage's regions by name, and refuses a stage without region names", () => {
    const [first, second] = local().regions;
    if (first === undefined || second === undefined) throw new Error("two layers are needed");
    const here = { ...local(), regions: [first, { ...second, memoryType: "VRAM" as const }] };
    const told = described({ ...here, regions: [second] });
    const { regionMemoryTypes: _, ...stage } = told;
    const place = { ...rank, ppRank: 1, ppSize: 2 };
    expect(remoteGeometry(stage, place, here)).toMatchObject({
      ...place,
      regions: [{ name: "layers.1", memoryType: "VRAM" }],
    });
    const { regionNames: __, ...nameless } = stage;
    expect(() => remoteGeometry(nameless, place, here)).toThrow(
      /stage 1 of engine e does not name its 1 regions/,
    );
  });

  it("a stage of a push P takes the regions of its own layers, by name, and refuses what it cannot match", () => {
    const all = local();
    const [, second] = all.regions;
    if (second === undefined) throw new Error("two layers are needed");
    const here: RankGeometry = { ...all, ppRank: 1, ppSize: 2, regions: [second] };
    const told = described(all);
    expect(remoteGeometry(told, rank, here).regions).toEqual([second]);
    // The other stage's layers are of another group, so the blocks of that group are not for these.
    const grouped = remoteGeometry({ ...told, regionGroupIds: [1, 0] }, rank, here);
    expect(grouped.regions).toEqual([{ ...second, groupIds: [0] }]);
    const refused = (metadata: Partial<AgentMetadata>, at: Partial<RankGeometry> = {}) =>
      expect(() => remoteGeometry({ ...told, ...metadata }, rank, { ...here, ...at }));
    refused({ regionNames: undefined }).toThrow(
      /engine e does not name its regions: stage 1 of this engine/,
    );
    refused({ regionNames: ["layers.0", "layers.9"] }).toThrow(/engine e has no region layers\.1/);
    refused({ packedMemberLayouts: { "layers.0": [0, 512] } }).toThrow(/rows with several layers/);
    refused({ regionMemoryTypes: ["DRAM", "VRAM"] }).toThrow(
      /regions in host and in device memory/,
    );
    refused({}, { stateSpace: { convBytes: 64, recurrentBytes: 128 } }).toThrow(/recurrent states/);
  });

  it("sends state sizes, and reads the layouts of packed members", () => {
    const here = {
      ...local(),
      stateSpace: { convProjectionBytes: [32, 16, 16], convBytes: 64, recurrentBytes: 128 },
    };
    const metadata = {
      ...described(here),
      packedMemberLayouts: { "layers.0": [0, 512] },
    };
    expect(metadata.ssmSizes).toEqual([64, 128]);
    expect(remoteGeometry(metadata, rank, here)).toMatchObject({
      stateSpace: { convBytes: 64, recurrentBytes: 128 },
      packedMembers: { "layers.0": { offsetBytes: 0, lengthBytes: 512 } },
    });
  });

  it("numbers the regions that share a cache's name, and sends them under that name", () => {
    // vLLM 0.33 registers a region for each head in LBHNC; a rank has three heads here.
    const names = ["layers.0", "layers.1"].flatMap((name) => [name, name, name]);
    const segmented = (tpRank: number): RankGeometry => {
      const { caches, region } = cachesOf();
      const lengths = { numBlocks: 1, blockLengthBytes: 64, blockStrideBytes: 64 };
      return localGeometry(
        {
          config: { ...caches.config, layout: "LHBNC", numKvHeads: 6 },
          regions: names.map((name, index) => ({
            ...region,
            ...lengths,
            name,
            offsetBytes: index * 64,
          })),
        },
        { tpRank, tpSize: 2 },
      );
    };
    const here = segmented(1);
    expect(here.regions.map(({ name, numKvHeads }) => [name, numKvHeads])).toEqual(
      ["layers.0", "layers.0 #2", "layers.0 #3", "layers.1", "layers.1 #2", "layers.1 #3"].map(
        (name) => [name, 2],
      ),
    );
    const told = described(segmented(1));
    expect(told.regionNames).toEqual(names);
    const members = names.map((name) => [name]);
    const remote = remoteGeometry(
      { ...told, regionMembers: members },
      { tpRank: 1, tpSize: 2 },
      here,
    );
    expect(remote.regions.map(({ name }) => name)).toEqual(here.regions.map(({ name }) => name));
    expect(remote.regions.map((region) => region.members)).toEqual(
      here.regions.map(({ name }) => [name]),
    );
    const plan = buildEngineTransferPlan({
      local: here,
      remotes: [remote],
      numKvHeads: 6,
      groups: ["full"],
    });
    expect(plan.form).toBe("copy");
    expect(
      planRequest(plan, { localBlockIds: [[0]], remoteBlockIds: [[0]], numTokens: 16 }).reads,
    ).toHaveLength(1);
    expect(provePlan(plan, { remotes: [remote], numKvHeads: 6 })).not.toHaveProperty("fault");
  });

  it("uses each layer's own block length when the layers of one group differ", () => {
    // vLLM 0.33 wraps such layers in one `UniformTypeKVCacheSpecs`. This group has two head sizes,
    // two numbers of heads, and a latent.
    const pages = [
      { name: "layers.0", bytes: (heads: number) => heads * 16 * 64 },
      { name: "layers.1", bytes: (heads: number) => heads * 16 * 128 },
      { name: "layers.2", bytes: (heads: number) => (heads / 4) * 16 * 64, numKvHeads: 2 },
      { name: "layers.3", bytes: () => 16 * 576, replicated: true },
    ];
    const side = (tpRank: number, tpSize: number): RankGeometry => ({
      ...local(),
      tpRank,
      tpSize,
      layout: "LBHNC",
      kernelBlockSize: 16,
      regions: pages.map(({ bytes, ...page }, index) => ({
        ...page,
        baseAddress: 2 ** 20 * (8 * tpRank + index + 1),
        numBlocks: 8,
        groupId: 0,
        blockLengthBytes: bytes(8 / tpSize),
        blockStrideBytes: bytes(8 / tpSize),
        memoryType: "DRAM",
      })),
    });
    const here = side(0, 1);
    const remotes = [0, 1].map((tpRank) => {
      const told = described(side(tpRank, 2));
      return remoteGeometry(told, { tpRank, tpSize: 2 }, here);
    });
    expect(remotes[0]?.regions.map(({ blockLengthBytes }) => blockLengthBytes)).toEqual([
      4096, 8192, 1024, 9216,
    ]);
    const plan = buildEngineTransferPlan({ local: here, remotes, numKvHeads: 8, groups: ["full"] });
    expect(provePlan(plan, { remotes, numKvHeads: 8 })).not.toHaveProperty("fault");
  });

  describe("groups with block sizes of their own", () => {
    const grouped = (...sizes: readonly (number | undefined)[]): KvCacheConfig => ({
      ...simConfig(16),
      groups: sizes.map((blockSize, index) => ({
        kind: "full",
        layerNames: [`layers.${index}`],
        ...(blockSize === undefined ? {} : { blockSize }),
      })),
    });
    const geometryOf = (config: KvCacheConfig) =>
      localGeometry({ ...cachesOf(config).caches, config }, rank);

    it("vllm#30419: are in a rank's geometry, those without one with the cache's", () => {
      expect(geometryOf(grouped(undefined, 64, 32)).groupBlockTokens).toEqual([16, 64, 32]);
      expect(geometryOf(grouped(undefined, undefined))).not.toHaveProperty("groupBlockTokens");
    });

    it("are those of a remote rank in the ratio of the cache's blocks, which a handshake does not carry", () => {
      const here = geometryOf(grouped(undefined, 64));
      const told = described(here);
      expect(remoteGeometry(told, rank, here).groupBlockTokens).toEqual([16, 64]);
      expect(remoteGeometry({ ...told, blockSize: 32 }, rank, here).groupBlockTokens).toEqual([
        32, 128,
      ]);
      expect(remoteGeometry({ ...told, blockSize: 5 }, rank, here).groupBlockTokens).toEqual([
        5, 20,
      ]);
      const kernel = { ...told, blockSize: 8, physicalBlocksPerLogical: 2 };
      expect(remoteGeometry(kernel, rank, here).groupBlockTokens).toEqual([16, 64]);
      const odd = geometryOf(grouped(undefined, 24));
      expect(remoteGeometry({ ...told, blockSize: 5 }, rank, odd)).not.toHaveProperty(
        "groupBlockTokens",
      );
      // A peer that groups its layers otherwise may have other sizes.
      const regionGroupIds = [1, 0];
      const elsewhere = {
        ...here,
        regions: here.regions.map((region, groupId) => ({ ...region, groupId })),
      };
      expect(remoteGeometry({ ...told, regionGroupIds }, rank, elsewhere)).not.toHaveProperty(
        "groupBlockTokens",
      );
    });
  });

  describe("cells, by which padded blocks are known (vllm#52516)", () => {
    /**
     * Regions of a rank with 4 heads of 8 elements and blocks of 16 tokens, by the bytes of each.
     */
    const cells = (
      lengths: readonly number[],
      change: Partial<KvCacheConfig> = {},
      region = {},
    ) => {
      const { caches, region: first } = cachesOf();
      const regions = lengths.map((blockLengthBytes, index) => ({
        ...first,
        name: `layers.${index}`,
        blockLengthBytes,
        blockStrideBytes: blockLengthBytes,
        ...region,
      }));
      const config = { ...caches.config, headSize: 8, dtype: "torch.bfloat16", ...change };
      return localGeometry({ config, regions }, rank).regions.map(({ cellBytes }) => cellBytes);
    };
    const block = 4 * 16;

    it("are K and V, or one of them, of the head size and the type", () => {
      expect(cells([block * 32, block * 32])).toEqual([32, 32]);
      expect(cells([block * 16, block * 16])).toEqual([16, 16]);
      expect(cells([block * 16], { cacheDtype: "fp8" })).toEqual([16]);
      expect(cells([block * 64], { cacheDtype: "torch.float32" })).toEqual([64]);
    });

    it("are not those of a padded block, and unknown where layers have heads of different sizes or scales", () => {
      expect(cells([block * 36, block * 36])).toEqual([32, 32]);
      expect(cells([block * 32, block * 36])).toEqual([undefined, undefined]);
      expect(cells([block * 36], { cacheDtype: "fp8_per_token_head" })).toEqual([undefined]);
    });

    it("are the engine's where it gives them", () => {
      expect(cells([block * 36], {}, { cellBytes: 36 })).toEqual([36]);
      expect(cells([block * 32, block * 36], {}, { cellBytes: 36 })).toEqual([36, 36]);
    });

    it("of a state are none", () => {
      const groups = [{ kind: "mamba", layerNames: ["layers.0"] }];
      const stateSpace = { convProjectionBytes: [64], recurrentBytes: 64 };
      expect(cells([block * 36], { groups, stateSpace })).toEqual([undefined]);
    });

    it("the type of the cache is a part of the model", () => {
      expect(modelGeometry({ ...simConfig(16), cacheDtype: "nvfp4" })).toMatchObject({
        cacheDtype: "nvfp4",
      });
    });
  });

  it("refuses a peer with a state that is replicated on every rank (ple_block_len)", () => {
    const here = local();
    const told = described(here);
    const refusal = (() => {
      try {
        remoteGeometry(
          { ...told, pleBlockLengthBytes: 4096 },
          rank,
          here,
          "model DeepSeek-V4-Linear",
        );
      } catch (error) {
        return KvError.is(error, "KV_PLAN_UNSUPPORTED") ? error : undefined;
      }
    })();
    expect(refusal?.message).toMatch(
      /^model DeepSeek-V4-Linear: engine e has a state .* pages of 4096 bytes \(ple_block_len\)/,
    );
  });

  it("takes prefill context parallelism, whose decode context parallelism is 1 or the same", () => {
    const here = local();
    const told = described(here);
    expect(remoteGeometry({ ...told, pcpSize: 2 }, rank, here)).toEqual(here);
    expect(remoteGeometry({ ...told, pcpSize: 4, dcpSize: 4 }, rank, here).dcpSize).toBe(4);
    expect(() => remoteGeometry({ ...told, pcpSize: 4, dcpSize: 2 }, rank, here)).toThrow(
      /prefill context parallelism of 4 and decode context parallelism of 2/,
    );
  });
});
