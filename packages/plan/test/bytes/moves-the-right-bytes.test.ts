import { descriptorPairs } from "@kv/interface";
import { isLongRun } from "@kv/testing/long-run";
import { handshakeTargetRanks } from "@kv/topology";
import fc from "fast-check";
import { expect, test, vi } from "vitest";
import {
  applyReceivePass,
  buildEngineTransferPlan,
  planRequest,
  type RequestBlocks,
} from "../../src/index.js";
import { PROPERTY_TIMEOUT_MS } from "../property-timeout.js";
import { share } from "../share.js";
import {
  CELL_BYTES,
  cellOffset,
  type EngineShape,
  engineOf,
  expandTable,
  label,
  type ModelShape,
  placeOf,
  type Rank,
  viewAt,
} from "./labelled-memory.js";

/** A pair of engines and one request; all else is derived from them. */
interface Scene {
  readonly model: ModelShape;
  readonly prefill: EngineShape;
  readonly decode: EngineShape;
  readonly numTokens: number;
  /** Logical decode blocks that a prefix hit supplies. */
  readonly computedBlocks: number;
  readonly tellsComputed: boolean;
  readonly permute: boolean;
  /** The requested form; default: the plan's choice. */
  readonly form?: "permute" | "direct";
  readonly seed: number;
}

const FILLER = 0xee;
const PREFILL_FILLER = 0xdd;

function shuffledBlocks(count: number, seed: number): number[] {
  const ids = Array.from({ length: count }, (_, index) => index);
  let state = seed >>> 0;
  for (let index = count - 1; index > 0; index--) {
    state = (Math.imul(state, 1_664_525) + 1_013_904_223) >>> 0;
    const other = state % (index + 1);
    [ids[index], ids[other]] = [ids[other] as number, ids[index] as number];
  }
  // Half of the pools have runs of consecutive blocks.
  return seed % 2 === 0 ? ids : Array.from({ length: count }, (_, index) => index);
}

const logicalTokens = (shape: EngineShape) =>
  shape.kernelBlockSize * shape.physicalBlocksPerLogical;
const writeLabel = (bytes: Uint8Array, offset: number, value: number) =>
  new DataView(bytes.buffer, bytes.byteOffset).setUint32(offset, value);
const readLabel = (bytes: Uint8Array, offset: number) =>
  new DataView(bytes.buffer, bytes.byteOffset).getUint32(offset);

/** Block tables of all groups: disjoint where groups share regions. */
function tablesOf(shape: EngineShape, groups: number, numTokens: number, seed: number): number[][] {
  const each = Math.ceil(numTokens / logicalTokens(shape));
  const pool = shuffledBlocks(shape.numLogicalBlocks, seed);
  return Array.from({ length: groups }, (_, group) => pool.slice(group * each, (group + 1) * each));
}

function holdsGroup(shape: EngineShape, region: number, group: number): boolean {
  const ids = shape.regionGroups;
  return new Set(ids).size === 1 || ids[region] === group || ids[region] === -1;
}

function fillPrefill(
  ranks: readonly Rank[],
  scene: Scene,
  tables: readonly (readonly number[])[],
): void {
  forEachCell(ranks, scene, scene.prefill, tables, 0, (bytes, offset, value) =>
    writeLabel(bytes, offset, value),
  );
}

function forEachCell(
  ranks: readonly Rank[],
  scene: Scene,
  shape: EngineShape,
  tables: readonly (readonly number[])[],
  fromToken: number,
  visit: (bytes: Uint8Array, offset: number, value: number, rank: Rank) => void,
): void {
  for (const rank of ranks) {
    for (const [region, bytes] of rank.bytes.entries()) {
      for (const [group, table] of tables.entries()) {
        if (!holdsGroup(shape, region, group)) continue;
        for (let head = 0; head < rank.numHeads; head++) {
          for (let token = fromToken; token < scene.numTokens; token++) {
            const place = placeOf(rank, table, token);
            const offset = cellOffset(rank, region, place.block, head, place.token);
            visit(bytes, offset, label(region, group, rank.firstHead + head, token), rank);
          }
        }
      }
    }
  }
}

function plansOf(scene: Scene, prefill: readonly Rank[], decode: readonly Rank[]) {
  return decode.map((local) => {
    const asked = handshakeTargetRanks({
      tpRank: local.geometry.tpRank,
      tpSize: scene.decode.tpSize,
      remoteTpSize: scene.prefill.tpSize,
    });
    return buildEngineTransferPlan({
      ...scene.model,
      local: local.geometry,
      remotes: asked.map((rank) => (prefill[rank] as Rank).geometry),
      conversions: scene.permute ? ["hnd-to-nhd"] : [],
      ...(scene.form === undefined ? {} : { form: scene.form }),
    });
  });
}

function check(scene: Scene): void {
  const prefill = engineOf(scene.prefill, scene.model, 2 ** 40, PREFILL_FILLER);
  const decode = engineOf(scene.decode, scene.model, 2 ** 30, FILLER);
  const numGroups = scene.model.groups.length;
  const prefillTables = tablesOf(scene.prefill, numGroups, scene.numTokens, scene.seed);
  const decodeTables = tablesOf(scene.decode, numGroups, scene.numTokens, scene.seed + 2);
  fillPrefill(prefill, scene, prefillTables);
  const blocks: RequestBlocks = {
    localBlockIds: decodeTables.map((table) => table.slice(scene.computedBlocks)),
    remoteBlockIds: prefillTables,
    numTokens: scene.numTokens,
    ...(scene.tellsComputed
      ? { localComputedBlocks: decodeTables.map(() => scene.computedBlocks) }
      : {}),
  };
  const plans = plansOf(scene, prefill, decode);
  const notified = new Map<number, number>();
  for (const [index, plan] of plans.entries()) {
    const local = decode[index] as Rank;
    const request = planRequest(plan, blocks);
    const written = local.bytes.map((bytes) => new Uint8Array(bytes.length));
    for (const rank of [...request.notifyRanks, ...request.reads.map((read) => read.remoteRank)]) {
      notified.set(rank, (notified.get(rank) ?? 0) + 1);
    }
    let moved = 0;
    for (const read of request.reads) {
      const source = plan.sources[read.sourceIndex];
      if (source === undefined) throw new Error("no such source");
      const [localList, remoteList] = [
        expandTable(source.localTable),
        expandTable(source.remoteTable),
      ];
      expect(read.localIds.length).toBe(read.remoteIds.length);
      // The descriptors that a transport gets; they must give the same ids.
      const told = descriptorPairs(read.descriptors);
      expect(pairsIn(told)).toEqual(pairsIn(read));
      for (const [at, localId] of told.localIds.entries()) {
        const [to, from] = [localList[localId], remoteList[told.remoteIds[at] ?? -1]];
        if (to === undefined || from === undefined)
          throw new Error("an id is outside of its table");
        expect(to.lengthBytes).toBe(from.lengthBytes);
        const remote = prefill[read.remoteRank] as Rank;
        const [target, origin] = [
          viewAt(local, to.address, to.lengthBytes),
          viewAt(remote, from.address, from.lengthBytes),
        ];
        const bytes = (remote.bytes[origin.region] as Uint8Array).subarray(
          origin.start,
          origin.start + from.lengthBytes,
        );
        (local.bytes[target.region] as Uint8Array).set(bytes, target.start);
        const marks = written[target.region] as Uint8Array;
        for (let byte = target.start; byte < target.start + to.lengthBytes; byte++)
          marks[byte] = (marks[byte] ?? 0) + 1;
        moved += to.lengthBytes;
      }
    }
    expect(moved).toBe(request.lengthBytes);
    expect(written.every((marks) => marks.every((times) => times <= 1))).toBe(true);
    if (request.receivePass !== undefined) applyReceivePass(plan, request.receivePass, local.bytes);
  }
  for (const { geometry } of prefill)
    expect(notified.get(geometry.tpRank)).toBe(plans[0]?.localConsumers);
  compare(scene, decode, decodeTables);
}

const pairsIn = ({ localIds, remoteIds }: { localIds: Int32Array; remoteIds: Int32Array }) =>
  [...localIds].map((id, at) => `${id}<${remoteIds[at]}`).sort();

/**
 * Checks that the request's cells arrived, the rest of its blocks is zero, and all other bytes are
 * unchanged.
 */
function compare(
  scene: Scene,
  decode: readonly Rank[],
  tables: readonly (readonly number[])[],
): void {
  const expected = engineOf(scene.decode, scene.model, 2 ** 30, FILLER);
  for (const rank of expected) {
    const { regions, physicalBlocksPerLogical } = rank.geometry;
    for (const [region, bytes] of rank.bytes.entries()) {
      for (const [group, table] of tables.entries()) {
        if (!holdsGroup(scene.decode, region, group)) continue;
        for (const logical of table.slice(scene.computedBlocks)) {
          for (let part = 0; part < physicalBlocksPerLogical; part++) {
            const start =
              (logical * physicalBlocksPerLogical + part) *
              (regions[region]?.blockStrideBytes ?? 0);
            bytes.fill(0, start, start + (regions[region]?.blockLengthBytes ?? 0));
          }
        }
      }
    }
  }
  const from = scene.computedBlocks * logicalTokens(scene.decode);
  forEachCell(expected, scene, scene.decode, tables, from, (bytes, offset, value) =>
    writeLabel(bytes, offset, value),
  );
  for (const [index, rank] of expected.entries()) {
    for (const [region, bytes] of rank.bytes.entries()) {
      const got = (decode[index] as Rank).bytes[region] as Uint8Array;
      const differs = bytes.findIndex((byte, at) => byte !== got[at]);
      if (differs < 0) continue;
      const cell = differs - (differs % CELL_BYTES);
      expect.fail(
        `decode rank ${index}, region ${region}, byte ${differs}: label ${readLabel(got, cell)}, expected ${readLabel(bytes, cell)}`,
      );
    }
  }
}

const divides = (one: number, other: number) => one % other === 0 || other % one === 0;

interface SceneOptions {
  readonly mla?: boolean;
  readonly layouts?: readonly EngineShape["layout"][];
  /** Default: as `layouts`, the same on both sides. */
  readonly remoteLayouts?: readonly EngineShape["layout"][];
  /** Kernel blocks of both sides, `[local, remote]`; default: the local one a multiple. */
  readonly blocks?: readonly (readonly [number, number])[];
}

function scenes(options: SceneOptions = {}): fc.Arbitrary<Scene> {
  const sizes = fc
    .record({
      prefillTp: fc.integer({ min: 1, max: 8 }),
      decodeTp: fc.integer({ min: 1, max: 8 }),
      numKvHeads: options.mla ? fc.constant(1) : fc.constantFrom(1, 2, 3, 4, 6, 8, 12, 16),
    })
    .filter(({ prefillTp, decodeTp, numKvHeads }) => {
      if (!divides(prefillTp, decodeTp)) return false;
      return (
        options.mla === true || (divides(prefillTp, numKvHeads) && divides(decodeTp, numKvHeads))
      );
    });
  const groupings = options.mla
    ? [{ groups: ["mla"], regions: [0, 0] } as const]
    : ([
        { groups: ["full"], regions: [0, 0] },
        { groups: ["full"], regions: [0] },
        { groups: ["full", "full"], regions: [0, 1] },
        { groups: ["full", "swa"], regions: [0, 0] },
        { groups: ["full", "swa"], regions: [-1, -1] },
        { groups: ["full", "full"], regions: [0, -1, 1] },
      ] as const);
  return fc
    .record({
      sizes,
      grouping: fc.constantFrom(...groupings),
      layout: fc.constantFrom(...(options.layouts ?? (["LBHNC", "BLHNC"] as const))),
      remoteLayout: fc.constantFrom(...(options.remoteLayouts ?? [undefined])),
      block:
        options.blocks === undefined
          ? fc.record({
              remoteBlock: fc.constantFrom(1, 2, 4, 16),
              ratio: fc.constantFrom(1, 1, 2, 3, 4),
            })
          : fc
              .constantFrom(...options.blocks)
              .map(([one, other]) => ({ remoteBlock: other, ratio: one / other })),
      localPhysical: fc.constantFrom(1, 1, 2, 3),
      remotePhysical: fc.constantFrom(1, 1, 2, 3),
      padding: fc.record({ prefill: fc.constantFrom(0, 0, 12), decode: fc.constantFrom(0, 0, 20) }),
      tokenShare: share,
      computedShare: share,
      tellsComputed: fc.boolean(),
      seed: fc.nat(),
    })
    .map((draw): Scene => {
      const { groups, regions } = draw.grouping;
      const shape = (
        tpSize: number,
        kernelBlockSize: number,
        physical: number,
        paddingBytes: number,
        blocks: number,
        layout: EngineShape["layout"],
      ) => ({
        tpSize,
        kernelBlockSize,
        physicalBlocksPerLogical: physical,
        layout,
        paddingBytes,
        numLogicalBlocks: blocks * groups.length,
        regionGroups: regions,
      });
      const { remoteBlock } = draw.block;
      const localBlock = Math.round(remoteBlock * draw.block.ratio);
      const [localLogical, remoteLogical] = [
        localBlock * draw.localPhysical,
        remoteBlock * draw.remotePhysical,
      ];
      const numTokens =
        1 + Math.floor(draw.tokenShare * Math.min(200, 5 * Math.max(localLogical, remoteLogical)));
      const needed = Math.ceil(numTokens / localLogical);
      const prefill = shape(
        draw.sizes.prefillTp,
        remoteBlock,
        draw.remotePhysical,
        draw.padding.prefill,
        Math.ceil(numTokens / remoteLogical) + 1,
        draw.remoteLayout ?? draw.layout,
      );
      const decode = shape(
        draw.sizes.decodeTp,
        localBlock,
        draw.localPhysical,
        draw.padding.decode,
        needed + 1,
        draw.layout,
      );
      return {
        model: { numKvHeads: draw.sizes.numKvHeads, groups },
        prefill,
        decode,
        numTokens,
        computedBlocks: Math.floor(draw.computedShare * needed * 0.99),
        tellsComputed: draw.tellsComputed,
        permute: false,
        seed: draw.seed,
      };
    });
}

// Hundreds of cases each: the default limit is less than a busy machine may need.
vi.setConfig({ testTimeout: PROPERTY_TIMEOUT_MS });

const RUNS = Number(process.env["KV_PROPERTY_RUNS"] ?? (isLongRun ? 400 : 80));

test("head-major caches: every TP pair, block ratio, padding, grouping and prefix hit", () => {
  fc.assert(fc.property(scenes(), check), { numRuns: RUNS });
});

test("MLA: reads one copy and notifies the other ranks", () => {
  fc.assert(fc.property(scenes({ mla: true, layouts: ["LBHNC", "LBNHC"] }), check), {
    numRuns: RUNS / 2,
  });
});

test("token-major caches: moves whole blocks for equal heads, and single tokens for a split by head", () => {
  fc.assert(fc.property(scenes({ layouts: ["LBNHC", "BLNHC"] }), check), { numRuns: RUNS / 2 });
});

const ALL_ORDERS = ["LBHNC", "BLHNC", "LBNHC", "BLNHC"] as const;
const UNLIKE_BLOCKS = [
  [16, 16],
  [32, 16],
  [16, 32],
  [4, 16],
  [48, 32],
  [6, 4],
  [3, 2],
  [1, 3],
] as const;

test("the direct form: any block sizes and orders, with a receive pass only for the tail", () => {
  const direct = scenes({
    layouts: ALL_ORDERS,
    remoteLayouts: ALL_ORDERS,
    blocks: UNLIKE_BLOCKS,
  }).map((scene): Scene => ({ ...scene, form: "direct" }));
  fc.assert(fc.property(direct, check), { numRuns: RUNS });
});

test("the form that the plan chooses", () => {
  fc.assert(
    fc.property(
      scenes({ layouts: ALL_ORDERS, remoteLayouts: ALL_ORDERS, blocks: UNLIKE_BLOCKS }),
      check,
    ),
    { numRuns: RUNS / 2 },
  );
});

test("the permute form when requested", () => {
  const permute = scenes().map((scene): Scene => ({ ...scene, form: "permute" }));
  fc.assert(fc.property(permute, check), { numRuns: RUNS / 4 });
});

test("MLA with any block sizes", () => {
  fc.assert(fc.property(scenes({ mla: true, layouts: ["LBHNC"], blocks: UNLIKE_BLOCKS }), check), {
    numRuns: RUNS / 4,
  });
});

test("head-major into token-major: the receive pass reorders, also across TP and block sizes", () => {
  const nhd = scenes({ layouts: ["LBHNC"] })
    .filter((scene) => scene.model.groups.length === 1)
    .map(
      (scene): Scene => ({ ...scene, permute: true, decode: { ...scene.decode, layout: "LBNHC" } }),
    );
  fc.assert(fc.property(nhd, check), { numRuns: RUNS / 2 });
});

// The rules of tools/conformance/beyond.ts, each by a case of its own.
const scene = (change: {
  model?: Partial<ModelShape>;
  prefill?: Partial<EngineShape>;
  decode?: Partial<EngineShape>;
}): Scene => {
  const shape: EngineShape = {
    tpSize: 1,
    kernelBlockSize: 16,
    physicalBlocksPerLogical: 1,
    layout: "LBHNC",
    paddingBytes: 0,
    numLogicalBlocks: 12,
    regionGroups: [0, 0],
  };
  return {
    model: { numKvHeads: 4, groups: ["full"], ...change.model },
    prefill: { ...shape, ...change.prefill },
    decode: { ...shape, ...change.decode },
    numTokens: 100,
    computedBlocks: 1,
    tellsComputed: true,
    permute: false,
    seed: 4,
  };
};

test.each([1, 2, 4])("beyond: prefill TP 8 above 4 KV heads, decode TP %i", (tpSize) => {
  check(scene({ prefill: { tpSize: 8 }, decode: { tpSize } }));
});

test.each([
  [4, 1],
  [4, 2],
  [8, 2],
])(
  "beyond: prefill TP %i, decode TP %i, prefill blocks of 16 into blocks of 32",
  (prefillTp, decodeTp) => {
    check(
      scene({ prefill: { tpSize: prefillTp }, decode: { tpSize: decodeTp, kernelBlockSize: 32 } }),
    );
  },
);

test.each([
  [16, 32],
  [48, 32],
])("beyond: decode blocks of %i filled from prefill blocks of %i", (local, remote) => {
  check(scene({ prefill: { kernelBlockSize: remote }, decode: { kernelBlockSize: local } }));
});

test.each([
  ["LBHNC", "LBNHC"],
  ["LBNHC", "LBHNC"],
  ["BLHNC", "LBHNC"],
  ["BLNHC", "LBHNC"],
] as const)("beyond: a decode cache of %s filled from one of %s", (local, remote) => {
  check(scene({ prefill: { layout: remote, tpSize: 2 }, decode: { layout: local } }));
});

test("beyond: token-major blocks split by head", () => {
  check(scene({ prefill: { layout: "LBNHC" }, decode: { layout: "LBNHC", tpSize: 2 } }));
});
