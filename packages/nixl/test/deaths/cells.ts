/** How a peer ends. `stop`: its process is stopped, and answers nothing. `terminate`: the worker thread that has its agent is terminated. */
export const ENDINGS = ["kill", "stop", "term", "close", "exit", "terminate"] as const;
/** What the agent does with that peer when it ends. */
export const PHASES = ["idle", "read", "write", "notify", "handshake"] as const;
/** How bytes reach the peer. */
export const ROUTES = ["ucx-cma", "ucx-tcp", "libfabric-tcp"] as const;

/** One row of the matrix of deaths. */
export interface Cell {
  readonly route: (typeof ROUTES)[number];
  readonly ending: (typeof ENDINGS)[number];
  readonly phase: (typeof PHASES)[number];
}

/** The name of a cell, as `--cells` takes it: `libfabric-tcp/close/read`. */
export const nameOf = ({ route, ending, phase }: Cell): string => `${route}/${ending}/${phase}`;

/** All cells, those of a route one after another. */
export const ALL_CELLS: readonly Cell[] = ROUTES.flatMap((route) =>
  ENDINGS.flatMap((ending) => PHASES.map((phase) => ({ route, ending, phase }))),
);

/** The cells whose names begin with one of the words; all for none. */
export const cellsNamed = (words: readonly string[]): Cell[] =>
  ALL_CELLS.filter((cell) => words.length === 0 || words.some((word) => nameOf(cell).startsWith(word)));

/** Cells in which every ending meets every phase, every route every ending, and every route every phase. */
export const PAIRWISE: readonly Cell[] = ENDINGS.flatMap((ending, row) =>
  PHASES.map((phase, column) => ({
    route: ROUTES[(row + 2 * column) % ROUTES.length] as Cell["route"],
    ending,
    phase,
  })),
);

/** The settings of a route for `nixlTransport`. A process has one route: UCX reads its variables once. */
export const settingsOf = (route: Cell["route"]): { backends: string[]; env: Record<string, string> } =>
  route === "libfabric-tcp"
    ? { backends: ["LIBFABRIC"], env: {} }
    : { backends: ["UCX"], env: { UCX_TLS: route === "ucx-cma" ? "cma,sm,self,tcp" : "tcp" } };
