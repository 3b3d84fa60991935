/**
 * What a staging copy does to a block, as data: which byte of the device stands for which byte of the wire. It is said of one block and
 * holds for every pair of a device block and a pool block, in both directions; `provePlan` of `@kv/plan` follows bytes through it. Derive it
 * from the code that copies, so that it says what is done.
 */
export interface StagingStage {
  /** Every array of blocks on the device. */
  readonly planes: readonly StagedPlane[];
  /** Every byte of a block of each plane is in exactly one piece, and so is every byte of a wire block that stands for something. */
  readonly copies: readonly StagedCopy[];
}

/** An array of blocks on the device: what the bytes of one of its blocks mean. */
export interface StagedPlane {
  /** For people, such as "model.layers.0 keys". */
  readonly name: string;
  /** Name of the wire region whose blocks its bytes stand in. */
  readonly region: string;
  /** Order of heads and tokens within a block. */
  readonly order: "head-major" | "token-major";
  /** Which bytes of a wire cell (K, then V, of one head and token) a cell of this plane holds: `cellBytes` from `cellBeginBytes` on. */
  readonly cellBeginBytes: number;
  readonly cellBytes: number;
  readonly blockLengthBytes: number;
}

/** `count` pieces of `lengthBytes`, evenly spaced on both sides; offsets are those within a block. */
export interface StagedCopy {
  /** Index into `planes`. */
  readonly plane: number;
  readonly deviceOffsetBytes: number;
  readonly deviceStrideBytes: number;
  readonly wireOffsetBytes: number;
  readonly wireStrideBytes: number;
  readonly lengthBytes: number;
  readonly count: number;
}
