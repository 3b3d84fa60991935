import type { Log } from "@kv/interface";
import type { SideChannelAddress } from "../instance/observed-side-channel.js";
import type { LogLevel } from "../processes/json-log.js";
import type { SupervisedServer } from "../processes/supervisor.js";

/** A server of the cluster. */
export interface ClusterMember {
  readonly name: string;
  readonly url: string;
  readonly backend: string | null;
  /** Where it answers handshakes; an instance of the cluster has one. */
  readonly sideChannel?: SideChannelAddress | null | undefined;
  /** Undefined with the memory transport, where all servers run in this process. */
  readonly process?: Pick<SupervisedServer, "pid" | "replaced"> | undefined;
}

export interface StartOptions {
  readonly log: Log;
  readonly logLevel: LogLevel;
  /** Restart a process that ends. Default: false. */
  readonly restart?: boolean | undefined;
  /** Port of what clients send requests to. Default: 0, a free one. */
  readonly proxyPort?: number | undefined;
  /** File that the spans of all servers are appended to. */
  readonly trace?: string | undefined;
}
