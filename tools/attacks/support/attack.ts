/** One row of the table of attacks. */
export interface AttackResult {
  /** What is attacked, and how. */
  readonly attack: string;
  /** How often, how many, how much. */
  readonly tries: string;
  /** What was observed, with numbers. */
  readonly result: string;
  /** Whether the server withstood the attack and still served others. */
  readonly ok: boolean;
}

/** The servers of a running demo. URLs have no path and no slash at the end. */
export interface FloodTarget {
  /** The proxy's HTTP for clients. */
  readonly proxyUrl: string;
  /** The proxy's admin port. */
  readonly adminUrl: string;
  /** The prefill worker's side channel. */
  readonly sideChannel: { readonly host: string; readonly port: number };
  /** The decode worker's HTTP. */
  readonly decodeUrl: string;
}

/** The exports of a file in `tools/attacks`. */
export interface AttackModule {
  /** Runs the whole attack against a server of its own. */
  readonly run: () => Promise<AttackResult>;
  /** Attacks a running demo until the signal aborts. */
  readonly flood?: (target: FloodTarget, signal: AbortSignal) => Promise<void>;
}
