import { createDecodeRequests, type DecodeScheduler, type HeartbeatOrder, remoteToTell } from "@kv/connector";
import type { Clock, KvCacheConfig } from "@kv/interface";
import { readRemoteBlocks } from "./remote-blocks.js";
import type { ReceiveOrder, RemoteBlocks } from "./step-metadata.js";

export interface DecodeStep {
  readonly receives: readonly ReceiveOrder[];
  readonly aborts: readonly string[];
  readonly heartbeats: readonly HeartbeatOrder[] | null;
}

/** The consumer's half of the scheduler side: hands the workers what to read, and which producers may free what is not read. */
export function createDecodeScheduler({
  clock,
  config,
}: {
  clock: Clock;
  config: KvCacheConfig;
}): DecodeScheduler<DecodeStep> {
  let receives: ReceiveOrder[] = [];
  let aborts: string[] = [];

  const requests = createDecodeRequests<{ remote: RemoteBlocks; numTokens: number | undefined }>({
    clock,
    config,
    orders: {
      read(params) {
        const remote = readRemoteBlocks(params, config);
        return { remote, numTokens: remote.numTokens };
      },
      toTell(params) {
        const remote = remoteToTell(params, "pull");
        return remote && { ...remote, blockIds: [] };
      },
      fetch(requestId, { remote }, { numTokens, ...blocks }) {
        receives.push({
          requestId,
          remote: { ...remote, numTokens: Math.min(numTokens, remote.numTokens ?? numTokens) },
          ...blocks,
          awaited: true,
        });
      },
      release({ requestId }, remote) {
        // A read of nothing: the workers tell the peer that it may free the blocks.
        receives.push({
          requestId,
          remote,
          localBlockIds: [],
          localComputedBlocks: [],
          awaited: false,
          seenAtMs: clock.now(),
        });
      },
      unfetch(requestId) {
        const unsent = receives.findIndex((each) => each.requestId === requestId);
        if (unsent >= 0) receives.splice(unsent, 1);
        return unsent >= 0;
      },
      abort: (requestId) => void aborts.push(requestId),
    },
  });

  function takeOrders() {
    const orders = { receives, aborts };
    receives = [];
    aborts = [];
    return orders;
  }

  return {
    ...requests,
    takeStep: () => ({ ...takeOrders(), heartbeats: requests.takeHeartbeats() }),
    hasStep: () => receives.length + aborts.length > 0 || requests.hasHeartbeats(),
    close() {
      requests.close();
      takeOrders();
    },
    get requests() {
      return requests.requests;
    },
    get heartbeats() {
      return requests.heartbeats;
    },
  };
}
