import type { Check } from "../row.js";

/** One entry of the table in `attacks.ts`. */
export interface Attack {
  readonly title: string;
  /** @default "proxy" */
  readonly victim?: "side-channel" | "bench" | "demo";
  readonly tries: string;
  /** @default 1 */
  readonly rounds?: number;
  /** @default 1 */
  readonly attackers?: number;
  /** @default no limit */
  readonly mostDescriptors?: number;
  /** False where the demo has nothing of the kind: `under-flood` attacks the demo. */
  readonly floods?: false;
  /**
   * One round, in a process of the attacker. What it returns must hold beside what holds for each
   * attack.
   */
  round(target: Target): Promise<readonly Check[] | undefined>;
}

/** A victim has some of them. URLs have no path. */
export interface Target {
  readonly pid: number;
  readonly proxyUrl: string;
  readonly adminUrl: string;
  readonly sideChannel: number;
  readonly instanceUrl: string;
  /** See `slow-instance.ts`. */
  readonly countsUrl: string;
  /** See `side-channel-victim.ts`. */
  readonly clientUrl: string;
  readonly benchPort: number;
}
