import type { Check } from "../row.js";

/** An attack on a server of ours: one entry of the table in `attacks.ts`. */
export interface Attack {
  /** What is attacked, and how. */
  readonly title: string;
  readonly victim: "proxy" | "side-channel" | "bench" | "demo";
  /** How much one round tries, in words. */
  readonly tries: string;
  /** @default 1 */
  readonly rounds?: number;
  /** Processes that attack at a time. @default 1 */
  readonly attackers?: number;
  /** How many descriptors the victim may have. @default no limit */
  readonly mostDescriptors?: number;
  /** Whether the demo has what is attacked: `under-flood` attacks it. */
  readonly floods: boolean;
  /**
   * One round, in a process of the attacker, which closes all connections afterwards. What it
   * returns must hold beside what holds for each attack.
   */
  round(target: Target): Promise<readonly Check[] | undefined>;
}

/** Where the servers are: a victim has some of them. URLs have no path. */
export interface Target {
  /** Of the process that is attacked. */
  readonly pid: number;
  readonly proxyUrl: string;
  readonly adminUrl: string;
  /** P's port. */
  readonly sideChannel: number;
  readonly instanceUrl: string;
  /** Tells what P has been asked: see `slow-instance.ts`. */
  readonly countsUrl: string;
  /** Has our client ask a listener: see `side-channel-victim.ts`. */
  readonly clientUrl: string;
  /** The port of `kv-nixl bench --listen`. */
  readonly benchPort: number;
}
