export { ZmqConnection, type ZmqConnectionOptions } from "./client/connection.js";
export {
  type SubscriptionLimits,
  ZmqSubscription,
  type ZmqSubscriptionOptions,
} from "./client/subscription.js";
export { HandshakeKeys, readHandshakeKeys } from "./keys.js";
export type { Answer, ZmqPeer } from "./listener/connection-table.js";
export { LimitedWarnings, type SideChannelLimits } from "./listener/limits.js";
export { readTcpEndpoint } from "./zmq-endpoint.js";
export type { ListenOptions } from "./zmq-side-channel.js";
export {
  type ZmqSideChannel,
  type ZmqSideChannelOptions,
  zmqSideChannel,
} from "./zmq-side-channel.js";
