/** Where one plane (K or V) of blocks lies on the device, and where its rows lie in a packed region. */
export interface PlaneGeometry {
  readonly deviceOffsetBytes: number;
  readonly deviceStrideBytes: number;
  /** Of a region with K and V side by side. */
  readonly wireOffsetBytes: number;
  readonly wireStrideBytes: number;
  /** K or V of a block: heads × tokens rows. */
  readonly blockLengthBytes: number;
  /** K or V of one head and token. */
  readonly rowBytes: number;
  /** 0 for K, 1 for V. */
  readonly half: 0 | 1;
}

/** The same bytes in the same order, as runs `[offsetBytes, lengthBytes]` on either side. */
export interface PlaneRuns {
  readonly device: Float64Array;
  readonly wire: Float64Array;
  readonly lengthBytes: number;
}

/**
 * The runs of blocks `device[i]` and `wire[i]`. On the device a block of a plane is one run, and neighbours are merged; on the wire each row is a run of
 * its own, since K and V of a head and token take turns.
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
