export { ZmqConnection, type ZmqConnectionOptions } from "./client/connection.js";
export {
  type SubscriptionLimits,
  ZmqSubscription,
  type ZmqSubscriptionOptions,
} from "./client/subscription.js";
export { HandshakeKeys, readHandshakeKeys } from "./keys/handshake-keys.js";
export { LimitedWarnings } from "./listener/limited-warnings.js";
export type { SideChannelLimits } from "./listener/limits.js";
export { readTcpEndpoint } from "./zmq-endpoint.js";
export { type ZmqSideChannelOptions, zmqSideChannel } from "./zmq-side-channel.js";
