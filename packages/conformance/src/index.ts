export {
  type ConnectorEnd,
  type ConnectorPair,
  type ConnectorSuiteOptions,
  connectorSuite,
} from "./connector.js";
export { type PlatformSuiteOptions, platformSuite } from "./platform.js";
export { type TransportSuiteOptions, transportSuite } from "./transport.js";
