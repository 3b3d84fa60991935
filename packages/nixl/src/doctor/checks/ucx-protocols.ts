/** A row of the protocol tables that UCX prints with `UCX_PROTO_INFO=y`. */
export interface UcxProtocol {
  readonly operation: "READ" | "WRITE";
  /** Message lengths in bytes, such as "0..inf". */
  readonly range: string;
  /** How the bytes move, such as "zero-copy" or "software emulation". */
  readonly how: string;
  /** Transports and devices, such as "cma/memory". */
  readonly lanes: string;
}

const TITLES: Readonly<Record<UcxProtocol["operation"], RegExp>> = {
  READ: /remote memory read by ucp_get/,
  WRITE: /remote memory write by ucp_put/,
};

/**
 * Parses UCX's protocols (1.15 to 1.23) for reads and writes of a peer's memory. UCX prints a table
 * per connection and change of protocol, so the last table of each operation counts.
 */
export function readUcxProtocols(log: string): UcxProtocol[] {
  const last = new Map<UcxProtocol["operation"], UcxProtocol[]>();
  let open: UcxProtocol[] | undefined;
  let operation: UcxProtocol["operation"] = "READ";
  for (const line of log.split("\n")) {
    const cells = /\|(.*)\|\s*$/
      .exec(line)?.[1]
      ?.split("|")
      .map((cell) => cell.trim());
    if (cells === undefined) {
      // Horizontal lines stand within a table; anything else ends it.
      if (!/\+[-+]+\+\s*$/.test(line)) open = undefined;
      continue;
    }
    if (cells.length === 1) {
      const found = (Object.keys(TITLES) as UcxProtocol["operation"][]).find((name) =>
        TITLES[name].test(cells[0] ?? ""),
      );
      open = found === undefined ? undefined : [];
      if (found !== undefined && open !== undefined) {
        operation = found;
        last.set(operation, open);
      }
      continue;
    }
    const [range = "", how = "", lanes = ""] = cells;
    if (/^\d/.test(range)) open?.push({ operation, range, how, lanes });
  }
  return [...(last.get("READ") ?? []), ...(last.get("WRITE") ?? [])];
}
