/** By what UCX reads a peer's memory, for one range of lengths. */
export interface UcxLane {
  /** Such as "0..inf". */
  readonly range: string;
  /** Such as "zero-copy", and the transports and devices. */
  readonly how: string;
}

/**
 * The lanes of the last table of remote reads in UCX's own account (`UCX_PROTO_INFO=y`, UCX 1.15 and later). Tables come one per
 * connection and change of mind; the last one is what holds.
 */
export function readUcxLanes(log: string): readonly UcxLane[] {
  let lanes: UcxLane[] = [];
  let reading = false;
  for (const line of log.split("\n")) {
    const cells = (/\|(.*)\|/.exec(line)?.[1] ?? "").split("|").map((cell) => cell.trim());
    if (cells.length === 1 && cells[0] !== "") {
      reading = /remote memory read/.test(cells[0] ?? "");
      if (reading) lanes = [];
    } else if (cells.length >= 3) {
      const [range = "", ...how] = cells;
      if (reading && /^\d/.test(range))
        lanes.push({ range, how: how.filter((cell) => cell !== "").join(" ") });
    } else if (!/^.*\+[-+]+\+?\s*$/.test(line)) reading = false;
  }
  return lanes;
}
