import type { KvCacheRegion, StagedCopy, StagedPlane, StagingLayout } from "@kv/interface";
import type { LayerPlanes } from "./neuron-caches.js";
import { type PlaneRuns, planeRuns } from "./relayout.js";

/** Derived from the runs that the copies use. Planes have the names of the device's regions. */
export function stagingLayout(layers: readonly LayerPlanes[], rowBytes: number): StagingLayout {
  const planes: StagedPlane[] = [];
  const copies: StagedCopy[] = [];
  const add = (region: string, plane: KvCacheRegion, half: 0 | 1): void => {
    const { name, blockLengthBytes, blockStrideBytes } = plane;
    const runs = planeRuns(
      {
        deviceOffsetBytes: 0,
        deviceStrideBytes: blockStrideBytes,
        wireOffsetBytes: 0,
        wireStrideBytes: 2 * blockLengthBytes,
        blockLengthBytes,
        rowBytes,
        half,
      },
      [0],
      [0],
    );
    copies.push(...evenCopies(planes.length, runs));
    const cell = { cellBeginBytes: half * rowBytes, cellBytes: rowBytes };
    planes.push({ name, region, order: "head-major", ...cell, blockLengthBytes });
  };
  for (const { name, key, value } of layers) {
    add(name, key, 0);
    add(name, value, 1);
  }
  return { planes, copies };
}

/** Joins consecutive pieces of equal length and spacing. */
function evenCopies(plane: number, { device, wire }: PlaneRuns): StagedCopy[] {
  const copies: StagedCopy[] = [];
  for (const piece of piecesOf(device, wire)) {
    const last = copies.at(-1);
    if (last?.lengthBytes !== piece.lengthBytes) {
      copies.push({ plane, ...piece, deviceStrideBytes: 0, wireStrideBytes: 0, count: 1 });
      continue;
    }
    const at = last.count - 1;
    const deviceStrideBytes =
      piece.deviceOffsetBytes - last.deviceOffsetBytes - at * last.deviceStrideBytes;
    const wireStrideBytes =
      piece.wireOffsetBytes - last.wireOffsetBytes - at * last.wireStrideBytes;
    const even =
      last.count === 1 ||
      (deviceStrideBytes === last.deviceStrideBytes && wireStrideBytes === last.wireStrideBytes);
    if (even)
      copies[copies.length - 1] = {
        ...last,
        deviceStrideBytes,
        wireStrideBytes,
        count: last.count + 1,
      };
    else copies.push({ plane, ...piece, deviceStrideBytes: 0, wireStrideBytes: 0, count: 1 });
  }
  return copies;
}

/** A piece ends where a run of either side ends. */
function* piecesOf(
  device: Float64Array,
  wire: Float64Array,
): Iterable<Pick<StagedCopy, "deviceOffsetBytes" | "wireOffsetBytes" | "lengthBytes">> {
  let [onDevice, intoDevice, onWire, intoWire] = [0, 0, 0, 0];
  while (onDevice < device.length && onWire < wire.length) {
    const [deviceLeft, wireLeft] = [
      (device[onDevice + 1] ?? 0) - intoDevice,
      (wire[onWire + 1] ?? 0) - intoWire,
    ];
    const lengthBytes = Math.min(deviceLeft, wireLeft);
    yield {
      deviceOffsetBytes: (device[onDevice] ?? 0) + intoDevice,
      wireOffsetBytes: (wire[onWire] ?? 0) + intoWire,
      lengthBytes,
    };
    [onDevice, intoDevice] =
      lengthBytes === deviceLeft ? [onDevice + 2, 0] : [onDevice, intoDevice + lengthBytes];
    [onWire, intoWire] =
      lengthBytes === wireLeft ? [onWire + 2, 0] : [onWire, intoWire + lengthBytes];
  }
}
