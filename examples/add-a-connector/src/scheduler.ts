import {
  ConnectorScheduler,
  type DecodeOrders,
  type FetchOrder,
  type RemoteRequest,
  readRemoteRequest,
} from "@kv/connector/building-blocks";
import {
  type ConnectorRequest,
  KvError,
  type KvTransferParams,
  type SchedulerConnector,
  type SchedulerOptions,
} from "@kv/interface";
import { FOLDER, type FolderStep, type LoadOrder } from "./step.js";

interface Source {
  readonly remote: RemoteRequest;
  readonly numTokens: number | undefined;
}

export function createFolderScheduler(options: SchedulerOptions): SchedulerConnector {
  const { groups } = options.cache;
  if (groups.length !== 1) {
    throw new KvError(
      "KV_PLAN_UNSUPPORTED",
      `${groups.length} KV cache groups: the folder connector takes one`,
    );
  }
  return new ConnectorScheduler(options, {
    name: FOLDER,
    transferMode: "pull",
    createDecodeOrders: ({ engine }) => new FolderOrders(engine.tpSize),
  });
}

type Orders = Pick<FolderStep, "loads" | "aborts" | "drops">;

class FolderOrders implements DecodeOrders<Source, Orders> {
  /** Requests that may read one file. */
  readonly maxReaders = 1;
  readonly #tpSize: number;
  #loads: LoadOrder[] = [];
  #aborts: string[] = [];
  #drops: RemoteRequest[] = [];

  constructor(tpSize: number) {
    this.#tpSize = tpSize;
  }

  read(params: KvTransferParams, numPromptTokens: number): Source {
    const { remote, parsed } = readRemoteRequest(params, "pull", numPromptTokens);
    const mismatch = (key: string, theirs: number, local: number) =>
      new KvError(
        "KV_REQUEST_INVALID",
        `kv_transfer_params: ${key} is ${theirs}, the local value is ${local}`,
      );
    if (remote.tpSize !== this.#tpSize) throw mismatch("tp_size", remote.tpSize, this.#tpSize);
    const groups = parsed.remoteBlockIds.length;
    if (groups !== 1) throw mismatch("the number of groups in remote_block_ids", groups, 1);
    return { remote, numTokens: parsed.remoteNumTokens };
  }

  fetch(requestId: string, { remote }: Source, order: FetchOrder): void {
    const { localBlockIds, localComputedBlocks } = order;
    this.#loads.push({ requestId, remote, localBlockIds, localComputedBlocks });
  }

  cancelFetch(requestId: string): boolean {
    const before = this.#loads.length;
    this.#loads = this.#loads.filter((order) => order.requestId !== requestId);
    return this.#loads.length < before;
  }

  abort(requestId: string): void {
    this.#aborts.push(requestId);
  }

  release(_request: ConnectorRequest, remote: RemoteRequest): void {
    this.#drops.push(remote);
  }

  fetched(remote: RemoteRequest): void {
    this.#drops.push(remote);
  }

  takeStep(): Orders {
    const orders = { loads: this.#loads, aborts: this.#aborts, drops: this.#drops };
    [this.#loads, this.#aborts, this.#drops] = [[], [], []];
    return orders;
  }

  get hasOrders(): boolean {
    return this.#loads.length + this.#aborts.length + this.#drops.length > 0;
  }
}
