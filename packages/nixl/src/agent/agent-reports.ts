import type { Ambient } from "@kv/interface";

/** The longest that an agent's thread may take to release everything once the time of `close` is over. It takes up to 0.2 s. */
export const STUCK_MS = 5000;

/** Logs and counts that connections of peers were refused for lack of file descriptors. */
export function reportRefused({ log, metrics }: Pick<Ambient, "log" | "metrics">, count: number): void {
  metrics.count("kv_nixl_connections_refused", count);
  log.error("nixl-connections-refused", {
    count,
    why: "this process has no file descriptor left for a connection of a peer, which has to try again",
    hint: "raise the limit: ulimit -n, LimitNOFILE= of a systemd unit, --ulimit nofile= of a container",
  });
}

/** Logs that an agent's thread did not return from NIXL `afterMs` after `close`, and is given up with all that NIXL holds. */
export function reportStuck({ log }: Pick<Ambient, "log">, agent: string, afterMs: number): void {
  log.error("nixl-agent-stuck", {
    agent,
    why: `its thread is in a call of NIXL and did not end ${afterMs} ms after close`,
    hint: "its memory stays allocated, and `released` of its transfers does not resolve; NIXL's log on stderr may say more",
  });
}
