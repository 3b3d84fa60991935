/**
 * How a peer ends. `stop`: its process is stopped, and answers nothing. `terminate`: the worker
 * thread that has its agent is terminated.
 */
export const ENDINGS = ["kill", "stop", "term", "close", "exit", "terminate"] as const;
/** What the agent does with that peer when it ends. */
export const PHASES = ["idle", "read", "write", "notify", "handshake"] as const;
/**
 * What that peer does with the agent when it ends: without a pause, and from its first READ on in
 * `handshake-by`. `small`: blocks of 64 bytes.
 */
export const PEER_PHASES = [
  "read-by",
  "small-read-by",
  "write-by",
  "small-write-by",
  "notify-by",
  "handshake-by",
] as const;
/** How bytes reach the peer. */
export const ROUTES = ["ucx-cma", "ucx-tcp", "libfabric-tcp"] as const;

/** One row of the matrix of deaths. */
export interface Cell {
  readonly route: (typeof ROUTES)[number];
  readonly ending: (typeof ENDINGS)[number] | "cable";
  readonly phase: (typeof PHASES | typeof PEER_PHASES)[number];
}

/** The name of a cell, as `--cells` takes it: `libfabric-tcp/close/read`. */
export const nameOf = ({ route, ending, phase }: Cell): string => `${route}/${ending}/${phase}`;

/** All cells, those of a route one after another. */
export const ALL_CELLS: readonly Cell[] = ROUTES.flatMap((route) =>
  ENDINGS.flatMap((ending) =>
    [...PHASES, ...PEER_PHASES].map((phase) => ({ route, ending, phase })),
  ),
);

/** Cells in which the cable to the peer is cut. CMA has none: its peers are on one host. */
export const CABLE_CELLS: readonly Cell[] = (["ucx-tcp", "libfabric-tcp"] as const).flatMap(
  (route) =>
    [...PHASES, ...PEER_PHASES].map((phase) => ({ route, ending: "cable" as const, phase })),
);

/** The cells whose names begin with one of the words; all for none. */
export const cellsNamed = (words: readonly string[]): Cell[] =>
  [...ALL_CELLS, ...CABLE_CELLS].filter(
    (cell) => words.length === 0 || words.some((word) => nameOf(cell).startsWith(word)),
  );

/** Whether the peer acts, and not the agent. */
export const isByPeer = ({ phase }: Cell): boolean => phase.endsWith("-by");

/**
 * Cells in which a peer that acts ends, few that take short. UCX over TCP, which needs the agent
 * for all, has every phase and every ending.
 */
export const BY_PEER: readonly Cell[] = [
  ...(["read-by", "small-read-by", "write-by", "handshake-by"] as const).map((phase) => ({
    route: "ucx-tcp" as const,
    ending: "kill" as const,
    phase,
  })),
  ...ENDINGS.filter((ending) => ending !== "kill").map((ending, row) => ({
    route: "ucx-tcp" as const,
    ending,
    phase: PEER_PHASES[row] as Cell["phase"],
  })),
  ...(["ucx-cma", "libfabric-tcp"] as const).flatMap((route) => [
    { route, ending: "kill" as const, phase: "read-by" as const },
    { route, ending: "close" as const, phase: "small-write-by" as const },
  ]),
];

/**
 * Cells in which every ending meets every phase of the agent, every route every ending, and every
 * route every phase.
 */
export const PAIRWISE: readonly Cell[] = ENDINGS.flatMap((ending, row) =>
  PHASES.map((phase, column) => ({
    route: ROUTES[(row + 2 * column) % ROUTES.length] as Cell["route"],
    ending,
    phase,
  })),
);

/**
 * The settings of a route for `nixlTransport`. A process has one route: UCX reads its variables
 * once. `device`: the only network device to use.
 */
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
