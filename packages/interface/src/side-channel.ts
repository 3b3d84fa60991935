/**
 * The side channel carries handshakes before any NIXL connection exists: a request of frames, a reply of frames.
 * vLLM 0.33 speaks it over ZMQ (REQ to ROUTER); tests speak it in memory.
 */
export interface SideChannel {
  /**
   * Answers requests on `host:port`. `answer` is called for each request's body, a single frame or several; `undefined`
   * means no reply, as vLLM does for what it does not understand. Whatever arrives and whatever `answer` throws, the
   * listener goes on. Port 0 takes a free one. Errors: `KV_SIDE_CHANNEL_BIND_FAILED`, naming host, port and the remedy.
   */
  listen(options: SideChannelListenOptions): Promise<SideChannelListener>;
  /** One request, one reply. Errors: `KV_SIDE_CHANNEL_UNREACHABLE`, `KV_SIDE_CHANNEL_TIMEOUT`. */
  request(options: SideChannelRequest): Promise<SideChannelReply>;
  close(): Promise<void>;
}

export interface SideChannelListenOptions {
  readonly host: string;
  readonly port: number;
  answer(
    frames: readonly Uint8Array[],
  ): Promise<readonly Uint8Array[] | undefined> | readonly Uint8Array[] | undefined;
}

export interface SideChannelListener {
  readonly host: string;
  readonly port: number;
  close(): Promise<void>;
}

export interface SideChannelRequest {
  readonly host: string;
  readonly port: number;
  readonly frames: readonly Uint8Array[];
  /** vLLM 0.33: 5000. */
  readonly timeoutMs: number;
  readonly signal?: AbortSignal | undefined;
}

export interface SideChannelReply {
  readonly frames: readonly Uint8Array[];
  /** The local clock, in ms, when the request left and when the reply came: the bounds of the clock offset. */
  readonly sentAtMs: number;
  readonly receivedAtMs: number;
}
