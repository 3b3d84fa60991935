// A connector of another author, without any @kv package: it keeps the KV of each finished prompt
// in this process, and loads it for a later request of the same tokens. Both sides live in one
// process. The test reads `loaded`.

export const state = { shelves: new Map(), loaded: [] };

const keyOf = ({ promptTokenIds }) => Array.from(promptTokenIds ?? []).join();
const none = () => ({
  finishedSending: [],
  finishedReceiving: [],
  failedReceiving: [],
  failedBlockIds: [],
});

function createScheduler({ config, engine }) {
  let orders = [];
  let step = 0;
  const id = engine.engineId;
  return {
    name: "ShelfConnector",
    loadFailurePolicy: config.loadFailurePolicy,
    async setHandshakeMetadata() {},
    matchedTokens(request, numComputedTokens) {
      const has = state.shelves.has(`${id} ${keyOf(request)}`);
      return has
        ? { tokens: request.numPromptTokens - numComputedTokens, async: true }
        : { tokens: 0, async: false };
    },
    cacheHitSource: () => "host",
    afterAllocation(request, [blockIds], externalTokens) {
      if (externalTokens === 0) return;
      state.loaded.push(`${id} ${request.requestId}`);
      orders.push({
        load: true,
        requestId: request.requestId,
        key: `${id} ${keyOf(request)}`,
        blockIds,
      });
    },
    buildStepMetadata() {
      step += 1;
      const taken = orders;
      orders = [];
      return { connector: "ShelfConnector", step, orders: taken };
    },
    requestFinished({ requestId, ...request }, [blockIds], reason) {
      if (reason !== "length") return { keepBlocks: false };
      orders.push({ load: false, requestId, key: `${id} ${keyOf(request)}`, blockIds });
      return { keepBlocks: true };
    },
    applyWorkerOutput() {},
    hasPendingWork: () => orders.length > 0,
    outstanding: () => ({ orders: orders.length }),
    async close() {},
  };
}

function createWorker({ tpRank, ppRank }) {
  let regions = [];
  let output = none();
  const listeners = [];
  const block = ({ memory, offsetBytes, blockLengthBytes, blockStrideBytes }, id) =>
    memory.bytes.subarray(
      offsetBytes + id * blockStrideBytes,
      offsetBytes + id * blockStrideBytes + blockLengthBytes,
    );
  return {
    name: "ShelfConnector",
    async registerKvCaches(caches) {
      regions = caches.regions;
    },
    async unregisterKvCaches() {},
    handshakeMetadata: async () => ({ tpRank, ppRank, payload: new Uint8Array() }),
    startLoad({ orders }) {
      for (const { load, requestId, key, blockIds } of orders) {
        if (load) {
          const shelf = state.shelves.get(key);
          for (const [at, region] of regions.entries())
            for (const [i, id] of blockIds.entries()) block(region, id).set(shelf[at][i]);
          output.finishedReceiving.push(requestId);
        } else {
          state.shelves.set(
            key,
            regions.map((region) => blockIds.map((id) => block(region, id).slice())),
          );
          output.finishedSending.push(requestId);
        }
      }
      if (orders.length > 0) for (const listener of listeners) listener();
    },
    async waitForSave() {},
    collectFinished() {
      const taken = output;
      output = none();
      return taken;
    },
    onProgress: (listener) => void listeners.push(listener),
    outstanding: () => ({}),
    async close() {},
  };
}

export default { name: "ShelfConnector", createScheduler, createWorker };
