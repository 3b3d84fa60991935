/**
 * The side channel carries handshakes before agents are connected: one request of frames, one reply
 * of frames. vLLM 0.33 speaks it over ZMQ (REQ to ROUTER); `zmqSideChannel` of `@kv/side-channel`
 * does the same, and `memorySideChannel` of `@kv/transport-memory` serves tests. Both sides of a
 * connector receive one as an option.
 *
 * Implementations in this repository have `Symbol.asyncDispose` on the side channel and on its
 * listeners, which calls `close`; an implementation of yours may leave it out.
 */
export interface SideChannel {
    /**
     * Listens for requests on `host:port` until the listener or the side channel closes. The listener
     * survives malformed requests and errors of `answer`. Errors: `KV_SIDE_CHANNEL_BIND_FAILED`,
     * naming host, port and the remedy; `KV_SIDE_CHANNEL_CLOSED`.
     */
    listen(options: SideChannelListenOptions): Promise<SideChannelListener>;
    /**
     * Sends one request and resolves with its reply. Errors: `KV_SIDE_CHANNEL_UNREACHABLE`,
     * `KV_SIDE_CHANNEL_TIMEOUT`, `KV_SIDE_CHANNEL_CLOSED`, `KV_WIRE_LIMIT_EXCEEDED` for a reply that
     * is too large. When the signal aborts, it rejects with the signal's reason or with
     * `KV_REQUEST_ABORTED`.
     */
    request(options: SideChannelRequest): Promise<SideChannelReply>;
    /**
     * The same side channel with encrypted and authenticated connections: both sides of each prove
     * that they have one of the shared keys. Its listeners accept, and its requests use, no other
     * connection. `keys` returns the keys that are valid now, at least one: requests use the first,
     * listeners accept each. Closing it closes the whole side channel. Absent where the side channel
     * cannot encrypt; a wrapper of a side channel wraps what this returns. Errors of its requests:
     * also `KV_HANDSHAKE_UNTRUSTED`.
     */
    withEncryption?(keys: () => readonly Uint8Array[]): SideChannel;
    /**
     * Closes all listeners and rejects requests in progress with `KV_SIDE_CHANNEL_CLOSED`. Calling it
     * again has no effect.
     */
    close(): Promise<void>;
}
/** Options of `SideChannel.listen`. */
export interface SideChannelListenOptions {
    /** Host name or address of the interface to bind. */
    readonly host: string;
    /** Port to bind; 0 takes a free port, which the listener reports. */
    readonly port: number;
    /**
     * Called with the frames of each request; returns the frames of the reply. `undefined` sends no
     * reply, as vLLM does for a request that it does not understand; an error has the same effect.
     * The frames are untrusted input.
     */
    answer(frames: readonly Uint8Array[]): Promise<readonly Uint8Array[] | undefined> | readonly Uint8Array[] | undefined;
}
/** An open listener. Its owner is the caller of `listen`. */
export interface SideChannelListener {
    /** Host as given to `listen`. */
    readonly host: string;
    /** The bound port. */
    readonly port: number;
    /** Unbinds the port. Calling it again has no effect. */
    close(): Promise<void>;
}
/** A request of `SideChannel.request`. */
export interface SideChannelRequest {
    /** Host name or address of the peer. */
    readonly host: string;
    /** Port of the peer. */
    readonly port: number;
    /** Frames of the request, without routing frames. */
    readonly frames: readonly Uint8Array[];
    /** Deadline for the whole exchange in milliseconds. vLLM 0.33 uses 5000. */
    readonly timeoutMs: number;
    /** Aborts the request. */
    readonly signal?: AbortSignal | undefined;
}
/** The reply to a request. */
export interface SideChannelReply {
    /** Frames of the reply, without routing frames. Untrusted input. */
    readonly frames: readonly Uint8Array[];
    /** Local clock in milliseconds when the request left. */
    readonly sentAtMs: number;
    /**
     * Local clock in milliseconds when the reply came. Together with `sentAtMs` it bounds the offset
     * between the peers' clocks.
     */
    readonly receivedAtMs: number;
}
