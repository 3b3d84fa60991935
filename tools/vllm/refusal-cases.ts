import type { CheckedPair, CheckedSide } from "@kv/plan/vllm";

const HEADS = 8;
/** Of one head in a block of 16 tokens. */
const HEAD_BYTES = 512;

type Change = Partial<Omit<CheckedPair, "local" | "remote">> & {
  readonly local?: Partial<CheckedSide>;
  readonly remote?: Partial<CheckedSide>;
};

function pair({ local = {}, remote = {}, ...change }: Change): CheckedPair {
  const facts = {
    numKvHeads: HEADS,
    isMla: false,
    hasStates: false,
    cacheDtype: "auto",
    isPush: false,
    prefixCaching: true,
    usesHostBuffer: false,
    permutes: false,
    needsHma: false,
    draftKvHeads: null,
    ...change,
  };
  const side = (given: Partial<CheckedSide>): CheckedSide => {
    const { tpSize = 1, blockSize = 16 } = given;
    const heads = facts.isMla ? 1 : Math.max(1, Math.floor(facts.numKvHeads / tpSize));
    const bytes = (count: number) => (HEAD_BYTES * count * blockSize) / 16;
    const last =
      facts.draftKvHeads === null ? heads : Math.max(1, Math.floor(facts.draftKvHeads / tpSize));
    const blockLengthsBytes = [bytes(heads), bytes(last)];
    return {
      tpSize,
      blockSize,
      dcpSize: 1,
      kernelsPerLogical: 1,
      layout: "LBHNC",
      attentionBackend: "FLASH_ATTN",
      regionNames: ["layers.0", "layers.1"],
      regionGroupIds: [0, 0],
      blockLengthsBytes,
      blockStridesBytes: given.blockLengthsBytes ?? blockLengthsBytes,
      memoryTypes: (given.blockLengthsBytes ?? blockLengthsBytes).map(() => "DRAM"),
      ...given,
    };
  };
  return { local: side(local), remote: side(remote), ...facts };
}

const MLA = { isMla: true, numKvHeads: 1 };
const DRAFT = { ...MLA, draftKvHeads: 8 };
const TP2 = { tpSize: 2 };
const TP4 = { tpSize: 4 };
const TP8 = { tpSize: 8 };
const BLOCK_32 = { blockSize: 32 };
const BLOCK_48 = { blockSize: 48 };
const KERNELS_2 = { kernelsPerLogical: 2 };
/** More regions than the other side has, without names. */
const threeRegions = (bytes: number): Partial<CheckedSide> => ({
  blockLengthsBytes: [bytes, bytes, bytes],
  regionNames: undefined,
  regionGroupIds: [0, 0, 0],
});

/** Pairs that each break one rule, and pairs that just keep it. */
const CHANGES: readonly Change[] = [
  {},
  {
    local: { dcpSize: 2, tpSize: 6 },
    remote: { dcpSize: 3, tpSize: 6 },
    ...MLA,
  },
  {
    local: { dcpSize: 2, tpSize: 2 },
    remote: TP2,
    ...MLA,
    hasStates: true,
  },
  { local: TP2, remote: { tpSize: 3 }, numKvHeads: 6 },
  { local: { tpSize: 3 }, remote: TP2, numKvHeads: 6 },
  { local: { blockSize: 16 }, remote: BLOCK_32 },
  { local: BLOCK_48, remote: BLOCK_32 },
  { local: BLOCK_48, remote: { blockSize: 16 } },
  { ...MLA, local: { blockSize: 16 }, remote: BLOCK_32 },
  { local: TP2, remote: TP8, numKvHeads: 4 },
  { local: TP8, remote: TP2, numKvHeads: 4 },
  { local: TP2, remote: TP4, numKvHeads: 4 },
  DRAFT,
  { ...DRAFT, remote: TP2 },
  { ...DRAFT, local: TP2 },
  {
    ...DRAFT,
    local: { tpSize: 2, dcpSize: 2 },
    remote: { tpSize: 2, dcpSize: 2 },
  },
  { ...DRAFT, local: { tpSize: 2, layout: "BLHNC" } },
  { ...DRAFT, isPush: true, local: TP2 },
  { ...MLA, draftKvHeads: 1, isPush: true, local: TP2 },
  { ...DRAFT, isPush: true },
  ...([1, 2] as const).map(
    (kernelsPerLogical): Change => ({
      ...MLA,
      local: { tpSize: 2, dcpSize: 2, kernelsPerLogical, regionGroupIds: [0, 1] },
      remote: { tpSize: 2, kernelsPerLogical },
    }),
  ),
  { hasStates: true, local: KERNELS_2 },
  { hasStates: true, local: KERNELS_2, prefixCaching: false },
  { hasStates: true, remote: TP2 },
  { hasStates: true, remote: { tpSize: 16 } },
  { hasStates: true, ...MLA },
  { hasStates: true, ...MLA, remote: { blockLengthsBytes: [512, 256] } },
  { hasStates: true, ...MLA, local: BLOCK_32 },
  { usesHostBuffer: true, local: BLOCK_32 },
  { usesHostBuffer: true },
  ...(["LBHNC", "LBNHC", "BLHNC", "BHLNC"] as const).flatMap((local) =>
    (["LBHNC", "LBNHC"] as const).flatMap((remote) =>
      [false, true].flatMap((permutes) => [
        { local: { layout: local }, remote: { layout: remote }, permutes },
        { local: { layout: local, tpSize: 2 }, remote: { layout: remote }, permutes },
      ]),
    ),
  ),
  { local: { layout: "LBNHC" }, permutes: true, needsHma: true },
  { ...MLA, local: { layout: "LBNHC" } },
  { local: { layout: "LBNHC", tpSize: 2 }, remote: { layout: "LBNHC" } },
  { local: { layout: "LBNHC", tpSize: 2 }, remote: { layout: "LBNHC", tpSize: 2 } },
  { local: { layout: "LBNHC", tpSize: 16 }, remote: { layout: "LBNHC", tpSize: 8 }, numKvHeads: 4 },
  { local: { attentionBackend: "CPU_ATTN" }, remote: { attentionBackend: "PLAIN" } },
  {
    local: { attentionBackend: "CPU_ATTN" },
    remote: { attentionBackend: "PLAIN" },
    needsHma: true,
  },
  { remote: { attentionBackend: "CPU_ATTN" }, needsHma: true },
  ...["nvfp4", "nvfp4_4over6", "fp8"].flatMap((cacheDtype): Change[] => [
    { cacheDtype, local: TP2 },
    { cacheDtype },
    { cacheDtype, local: TP8, remote: TP4, numKvHeads: 4 },
  ]),
  {
    remote: threeRegions(4096),
  },
  { remote: { blockLengthsBytes: [1000, 1000] } },
  { local: TP2, remote: { blockLengthsBytes: [4096, 4000] } },
  { remote: { tpSize: 2, blockLengthsBytes: [2000, 2000] } },
  { ...MLA, remote: { blockLengthsBytes: [256, 256] } },
  { local: { tpSize: 16 }, remote: { tpSize: 16, blockLengthsBytes: [256, 256] } },
  { local: BLOCK_32, remote: TP2 },
  { ...MLA, local: BLOCK_32, remote: TP2 },
  { remote: { blockStridesBytes: [10, 4096] } },
  { remote: { blockStridesBytes: [8192, 8192] } },
  { remote: { regionNames: ["layers.1", "layers.0"] } },
  { remote: { regionNames: undefined } },
  { isPush: true },
  { isPush: true, local: TP2 },
];

const PUSH = { isPush: true, writes: true };
const STAGES = { ...PUSH, needsHma: true };
const packed: Partial<CheckedSide> = {
  layout: "BLHNC",
  blockLengthsBytes: [1024],
  regionNames: ["layers.0"],
  regionGroupIds: [0],
  packedMembers: { "layers.0": [0, 512], "layers.1": [512, 512] },
};
const oneLayer: Partial<CheckedSide> = {
  blockLengthsBytes: [512],
  regionNames: ["layers.0"],
  regionGroupIds: [0],
};
const oneRow: Partial<CheckedSide> = {
  ...oneLayer,
  layout: "BLHNC",
  packedMembers: { "layers.0": [0, 512] },
};
const otherGroups = { regionGroupIds: [0, 1] };
const blocks = (
  decodeBlocks: readonly number[],
  prefillBlocks: readonly number[],
  numTokens: number | null,
) => ({ request: { decodeBlocks, prefillBlocks, numTokens } });

/** They break a rule outside of the handshake's validation, or just keep it. */
const MORE_CHANGES: readonly Change[] = [
  { ...MLA, local: TP4, remote: { tpSize: 4, pcpSize: 4, dcpSize: 2 } },
  { ...MLA, local: TP4, remote: { tpSize: 4, pcpSize: 4, dcpSize: 4 } },
  { ...MLA, local: { tpSize: 2, dcpSize: 2 }, remote: { tpSize: 2, pcpSize: 2 } },
  { ...MLA, local: { tpSize: 2, pcpSize: 2 }, remote: { tpSize: 2, dcpSize: 2 } },
  { ...STAGES, local: { ppSize: 2 } },
  { ...STAGES, local: { ppSize: 2, blockSize: 32 } },
  { ...STAGES, local: { ppSize: 2 }, remote: TP2 },
  { ...STAGES, ...MLA, local: { ppSize: 2 }, remote: TP2 },
  { ...STAGES, local: { ppSize: 2, tpSize: 2 } },
  { ...STAGES, local: { ppSize: 2, ...otherGroups } },
  { ...MLA, local: packed, remote: packed },
  {
    ...MLA,
    local: packed,
    remote: { ...packed, packedMembers: { "layers.0": [0, 512], "layers.1": [0, 512] } },
  },
  { ...MLA, remote: packed },
  { ...MLA, remote: { ...packed, regionGroupIds: [-1] } },
  { ...MLA, remote: { ...packed, regionNames: undefined } },
  { ...MLA, local: oneLayer, remote: { ...oneRow, regionGroupIds: [-1] } },
  { ...MLA, local: oneLayer, remote: { ...oneRow, regionNames: undefined } },
  { local: { engineId: "same" }, remote: { engineId: "same" } },
  { hasStates: true, local: BLOCK_32, remote: TP2 },
  {
    hasStates: true,
    ...MLA,
    local: BLOCK_32,
    remote: { tpSize: 2, blockLengthsBytes: [512, 512] },
  },
  { hasStates: true, ...MLA, local: BLOCK_48, remote: BLOCK_32 },
  { hasStates: true, local: { pleBlockLengthBytes: 128 }, remote: { pleBlockLengthBytes: 256 } },
  { hasStates: true, local: { pleBlockLengthBytes: 128 }, remote: { pleBlockLengthBytes: 128 } },
  { remote: { memoryTypes: ["DRAM", "VRAM"] } },
  {
    ...MLA,
    remote: threeRegions(512),
  },
  { local: otherGroups },
  { ...MLA, local: otherGroups },
  { ...MLA, local: { ...otherGroups, blockSize: 32 } },
  { ...MLA, local: { regionGroupIds: [-1, -1], kernelsPerLogical: 2 } },
  { ...MLA, local: { ...otherGroups, kernelsPerLogical: 2 }, ...blocks([2, 2], [2], null) },
  { ...MLA, local: { ...otherGroups, kernelsPerLogical: 2 }, ...blocks([2, 2], [2], 32) },
  { ...MLA, local: otherGroups, ...blocks([3, 2], [2], null) },
  { ...MLA, local: otherGroups, ...blocks([3, 2], [2], 48) },
  { ...MLA, local: otherGroups, ...blocks([3, 2], [2], 32) },
  PUSH,
  { ...PUSH, local: otherGroups },
  blocks([3], [2], null),
  blocks([2], [3], null),
  blocks([0], [3], null),
  { ...PUSH, ...blocks([3], [2], null) },
  { ...PUSH, ...blocks([2], [3], null) },
  { hasStates: true, ...blocks([2, 3], [2, 1], null) },
  { hasStates: true, ...blocks([2, 2], [2, 1], null) },
  { hasStates: true, ...blocks([9, 1], [2, 1], null) },
  { hasStates: true, ...blocks([2, 1], [9, 1], null) },
  { isCsaLinear: true, numKvHeads: 4, local: TP2, remote: TP4 },
  { isCsaLinear: true, numKvHeads: 8, local: TP2, remote: TP4 },
  {
    hasStates: true,
    isPush: true,
    remote: threeRegions(4096),
  },
];

const SIZES = [1, 2, 3, 4, 8];
const BLOCKS = [
  [16, 16],
  [32, 16],
  [16, 32],
] as const;

export function refusalCases(): readonly CheckedPair[] {
  const grid = SIZES.flatMap((local) =>
    SIZES.flatMap((remote) =>
      BLOCKS.flatMap(([localBlock, remoteBlock]) =>
        [1, 4, 8].flatMap((numKvHeads) =>
          [false, true]
            .filter((isMla) => !isMla || numKvHeads === 1)
            .map(
              (isMla): Change => ({
                isMla,
                numKvHeads,
                local: { tpSize: local, blockSize: localBlock },
                remote: { tpSize: remote, blockSize: remoteBlock },
              }),
            ),
        ),
      ),
    ),
  );
  return [...CHANGES, ...MORE_CHANGES, ...grid].map(pair);
}
