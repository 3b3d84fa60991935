import { type Check, check } from "../checks/report.js";

export const FINDING_KINDS = {
  "kv-differs": {
    meaning:
      "P keeps or computes other KV than the reference: its decode workers answer with wrong text and status 200",
    remedy:
      "drain this P and restart it with an empty cache; kv-peer record and kv-peer diff show what differs",
  },
  "tokens-differ": {
    meaning:
      "D generates other tokens from the same prompt: the KV was damaged on its way, or D is at fault",
    remedy: "drain this D; kv-peer doctor with both servers checks the plan and the bytes",
  },
  "canary-failed": {
    meaning: "the canary prompt was not served: other requests may fail in the same way",
    remedy: "the code says what failed; kv-peer doctor with this pair shows more",
  },
  unreachable: {
    meaning: "the server does not answer: the pair serves nothing",
    remedy:
      "check that the server runs, and that this host reaches its HTTP port and its side channel",
  },
  "notifications-after-expiry": {
    meaning:
      "decode workers read blocks after P's lease had ended: these may have been reused, and the text be wrong",
    remedy: "raise kv_lease_duration at P, or give decode workers more blocks",
  },
  "expired-requests": {
    meaning:
      "leases ended before a decode worker had read the blocks: these requests fail or are computed again",
    remedy:
      "raise kv_lease_duration at P, add decode workers, or look for a decode worker that hangs",
  },
  "failed-transfers": {
    meaning: "transfers, handshakes or notifications failed",
    remedy: "the server's log has a line for each; kv-peer doctor checks the transport",
  },
  "blocks-stay-allocated": {
    meaning:
      "blocks are in use although no request runs or waits: they are leaked, or their D never came",
    remedy:
      "look for aborted requests in the log; kv-peer load measures leaks; a restart frees the blocks",
  },
  "shared-base-address": {
    meaning:
      "two regions of the KV cache have one address: a transfer of one overwrites the other (vllm-project/vllm#57661)",
    remedy: "upgrade vLLM, or choose another attention backend or cache layout",
  },
  "wide-address": {
    meaning:
      "a port without authentication listens on every address: whoever reaches it reads prompts or stops the server",
    remedy:
      "set VLLM_NIXL_SIDE_CHANNEL_HOST, or the endpoint of --kv-events-config, to the address of the inner network",
  },
} as const;

export type FindingKind = keyof typeof FINDING_KINDS;

/** A check that `kv-peer watch` reports: of a server, by its URL. */
export function finding(kind: FindingKind, server: string, found: string): Check {
  const { meaning, remedy } = FINDING_KINDS[kind];
  return check(`watch.${kind}`, meaning, "fail", found, { fix: remedy, details: { server } });
}

/** A finding as `kv-peer watch --json` and its webhook have it. */
export function findingJson({ id, title, found, fix, details }: Check) {
  const kind = id.slice("watch.".length);
  return { kind, server: String(details?.server), found, meaning: title, remedy: fix };
}

/** A finding as one line: what was seen, what it means, what to do. */
export function findingLine(seen: Check): string {
  const { kind, server, found, meaning, remedy } = findingJson(seen);
  return `${kind}  ${server}: ${found}; ${meaning}; remedy: ${remedy}`.replaceAll(
    /\s*[\r\n]+\s*/g,
    " ",
  );
}
