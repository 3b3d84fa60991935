export {
  type ProxySettings,
  type ProxySettingsInput,
  proxySettingsSchema,
} from "./config/settings.js";
export {
  createProxy,
  type Proxy,
  type ProxyAddress,
  type ProxyOptions,
  type ProxyStatus,
} from "./proxy.js";
export type { RequestCountsStatus } from "./telemetry/request-record.js";
