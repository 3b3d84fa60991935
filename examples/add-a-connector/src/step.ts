import type {
  ConnectorStepMetadata,
  FetchOrder,
  RemoteRequest,
} from "@kv/connector/building-blocks";

export const FOLDER = "FolderConnector";

/** D: a file to read. */
export interface LoadOrder extends Pick<FetchOrder, "localBlockIds" | "localComputedBlocks"> {
  readonly requestId: string;
  readonly remote: RemoteRequest;
}

export interface FolderStep extends ConnectorStepMetadata {
  readonly loads: readonly LoadOrder[];
  /** Requests whose load is aborted. */
  readonly aborts: readonly string[];
  /** Requests at P whose files nobody will read any more. */
  readonly drops: readonly RemoteRequest[];
}
