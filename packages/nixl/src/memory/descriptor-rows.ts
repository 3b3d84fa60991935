/** One row of a list: descriptors of one length at equal distances. */
export interface DescriptorRow {
  /** Where the first descriptor begins; for storage an offset. */
  readonly address: number;
  /** Bytes of one descriptor. */
  readonly lengthBytes: number;
  /** `deviceId` of the memory. @default 0 */
  readonly deviceId?: number | undefined;
  /** Bytes from the start of one descriptor to the next. @default lengthBytes */
  readonly strideBytes?: number | undefined;
  /** Number of descriptors. @default 1 */
  readonly count?: number | undefined;
}

/**
 * Rows of a `DescriptorTable` from named fields. `prepareLocal` and `prepareRemote` check the
 * numbers.
 */
export function descriptorRows(rows: readonly DescriptorRow[]): Float64Array {
  return Float64Array.from(
    rows.flatMap(({ address, lengthBytes, deviceId = 0, strideBytes = lengthBytes, count = 1 }) => [
      address,
      lengthBytes,
      deviceId,
      strideBytes,
      count,
    ]),
  );
}
