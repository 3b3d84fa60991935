/** How a peer ends. `stop`: its process is stopped, and answers nothing. `terminate`: the worker thread that has its agent is terminated. */
export const ENDINGS = ["kill", "stop", "term", "close", "exit", "terminate"] as const;
/** What the agent does with that peer when it ends. */
export const PHASES = ["idle", "read", "write", "notify", "handshake"] as const;
/** How bytes reach the peer. */
export const ROUTES = ["ucx-cma", "ucx-tcp", "libfabric-tcp"] as const;

/** One row of the matrix of deaths. */
export interface Cell {
  readonly route: (typeof ROUTES)[number];
  readonly ending: (typeof ENDINGS)[number] | "cable";
  readonly phase: (typeof PHASES)[number];
}

/** The name of a cell, as `--cells` takes it: `libfabric-tcp/close/read`. */
export const nameOf = ({ route, ending, phase }: Cell): string => `${route}/${ending}/${phase}`;

/** All cells, those of a route one after another. */
export const ALL_CELLS: readonly Cell[] = ROUTES.flatMap((route) =>
  ENDINGS.flatMap((ending) => PHASES.map((phase) => ({ route, ending, phase }))),
);

/** Cells in which the cable to the peer is cut. CMA has none: its peers are on one host. */
export const CABLE_CELLS: readonly Cell[] = (["ucx-tcp", "libfabric-tcp"] as const).flatMap((route) =>
  PHASES.map((phase) => ({ route, ending: "cable" as const, phase })),
);

/** The cells whose names begin with one of the words; all for none. */
export const cellsNamed = (words: readonly string[]): Cell[] =>
  [...ALL_CELLS, ...CABLE_CELLS].filter(
    (cell) => words.length === 0 || words.some((word) => nameOf(cell).startsWith(word)),
  );

/** Cells in which every ending meets every phase, every route every ending, and every route every phase. */
export const PAIRWISE: readonly Cell[] = ENDINGS.flatMap((ending, row) =>
  PHASES.map((phase, column) => ({
    route: ROUTES[(row + 2 * column) % ROUTES.length] as Cell["route"],
    ending,
    phase,
  })),
);

/** The settings of a route for `nixlTransport`. A process has one route: UCX reads its variables once. `device`: the only network device to use. */
export function settingsOf(
  route: Cell["route"],
  device?: string,
): { backends: string[]; env: Record<string, string> } {
  if (route === "libfabric-tcp")
    return { backends: ["LIBFABRIC"], env: device === undefined ? {} : { FI_TCP_IFACE: device } };
  const transports = { UCX_TLS: route === "ucx-cma" ? "cma,sm,self,tcp" : "tcp" };
  return {
    backends: ["UCX"],
    env: device === undefined ? transports : { ...transports, UCX_NET_DEVICES: device },
  };
}
