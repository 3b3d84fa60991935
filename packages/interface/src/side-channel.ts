/**
 * Carries handshakes before agents are connected: one request and one reply of frames. vLLM 0.33
 * and `zmqSideChannel` of `@kv/side-channel` use ZMQ (REQ to ROUTER).
 *
 * Side channels and listeners here also have `Symbol.asyncDispose`; yours may leave it out.
 */
export interface SideChannel {
  /**
   * Listens on `host:port` until it or the side channel closes. The listener survives malformed
   * requests and errors of `answer`.
   *
   * @throws `KV_SIDE_CHANNEL_BIND_FAILED`, `KV_SIDE_CHANNEL_CLOSED`.
   */
  listen(options: SideChannelListenOptions): Promise<SideChannelListener>;
  /**
   * Sends one request and resolves with its reply.
   *
   * @throws `KV_SIDE_CHANNEL_UNREACHABLE`, `KV_SIDE_CHANNEL_TIMEOUT`, `KV_SIDE_CHANNEL_CLOSED`,
   * `KV_WIRE_LIMIT_EXCEEDED` for too large a reply; on abort, the signal's reason or
   * `KV_REQUEST_ABORTED`.
   */
  request(options: SideChannelRequest): Promise<SideChannelReply>;
  /**
   * Returns the same side channel with encrypted connections only, where both sides prove that they
   * have a shared key. `keys` returns those valid now, at least one: requests use the first,
   * listeners accept all. Closing either closes both. Requests also fail with
   * `KV_HANDSHAKE_UNTRUSTED`. Absent: it cannot encrypt. A wrapper must wrap the result.
   */
  withEncryption?(keys: () => readonly Uint8Array[]): SideChannel;
  /**
   * Closes all listeners and rejects requests in progress with `KV_SIDE_CHANNEL_CLOSED`.
   * Idempotent.
   */
  close(): Promise<void>;
}

/** Options of `SideChannel.listen`. */
export interface SideChannelListenOptions {
  readonly host: string;
  /** 0 takes a free port, which the listener reports. */
  readonly port: number;
  /**
   * Answers untrusted `frames`. `undefined` or an error sends no reply, as vLLM does for what it
   * does not understand.
   */
  answer(
    frames: readonly Uint8Array[],
  ): Promise<readonly Uint8Array[] | undefined> | readonly Uint8Array[] | undefined;
}

/** An open listener. The caller of `listen` owns it. */
export interface SideChannelListener {
  readonly host: string;
  readonly port: number;
  /** Unbinds the port. Idempotent. */
  close(): Promise<void>;
}

/** A request of `SideChannel.request`. */
export interface SideChannelRequest {
  readonly host: string;
  readonly port: number;
  /** Routing frames are left out. */
  readonly frames: readonly Uint8Array[];
  /** Deadline for the whole exchange; vLLM 0.33 uses 5000. */
  readonly timeoutMs: number;
  readonly signal?: AbortSignal | undefined;
}

/** The reply to a request. */
export interface SideChannelReply {
  /** Untrusted input; routing frames are left out. */
  readonly frames: readonly Uint8Array[];
  /** Local clock when the request left. */
  readonly sentAtMs: number;
  /**
   * Local clock when the reply came. With `sentAtMs` it bounds the offset between the peers'
   * clocks.
   */
  readonly receivedAtMs: number;
}
