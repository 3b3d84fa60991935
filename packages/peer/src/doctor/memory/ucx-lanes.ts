/** The transport that UCX uses to read a peer's memory, for one range of lengths. */
export interface UcxLane {
  /** Lengths in bytes, such as "0..inf". */
  readonly range: string;
  /** Protocol, transports and devices, such as "zero-copy rc_mlx5/mlx5_0:1". */
  readonly how: string;
}

/**
 * Reads the last table of remote memory reads in the output of UCX with `UCX_PROTO_INFO=y` (UCX 1.15 and later). UCX prints a table for each
 * connection and each change of protocol.
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
