/** Where a plane (K or V) is on the device and in the pool. */
export interface PlaneGeometry {
  /** Of the plane's block 0 in device memory. */
  readonly deviceOffsetBytes: number;
  readonly deviceStrideBytes: number;
  /** Of the packed region's block 0 in the pool. */
  readonly wireOffsetBytes: number;
  readonly wireStrideBytes: number;
  readonly blockLengthBytes: number;
  readonly rowBytes: number;
  readonly half: 0 | 1;
}

/** Runs `[offsetBytes, lengthBytes]` with the same bytes in the same order on both sides. */
export interface PlaneRuns {
  readonly device: Float64Array;
  readonly wire: Float64Array;
  readonly lengthBytes: number;
}

/**
 * The runs of device blocks `device[i]` and pool blocks `wire[i]`. On the device, adjacent blocks
 * merge. In the pool, each row is a run, because K and V of a head and token alternate.
 */
export function planeRuns(
  geometry: PlaneGeometry,
  device: readonly number[],
  wire: readonly number[],
): PlaneRuns {
  const { blockLengthBytes, rowBytes, half } = geometry;
  const deviceRuns: number[] = [];
  for (const id of device) {
    const offset = geometry.deviceOffsetBytes + id * geometry.deviceStrideBytes;
    const last = deviceRuns.length - 1;
    if (last > 0 && (deviceRuns[last - 1] ?? 0) + (deviceRuns[last] ?? 0) === offset) {
      deviceRuns[last] = (deviceRuns[last] ?? 0) + blockLengthBytes;
    } else deviceRuns.push(offset, blockLengthBytes);
  }
  const rows = blockLengthBytes / rowBytes;
  const wireRuns = new Float64Array(2 * rows * wire.length);
  let at = 0;
  for (const id of wire) {
    let offset = geometry.wireOffsetBytes + id * geometry.wireStrideBytes + half * rowBytes;
    for (let row = 0; row < rows; row++) {
      wireRuns[at++] = offset;
      wireRuns[at++] = rowBytes;
      offset += 2 * rowBytes;
    }
  }
  return {
    device: Float64Array.from(deviceRuns),
    wire: wireRuns,
    lengthBytes: device.length * blockLengthBytes,
  };
}
