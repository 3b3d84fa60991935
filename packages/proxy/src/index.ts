export {
  type ProxySettings,
  type ProxySettingsInput,
  proxySettingsSchema,
} from "./config/settings.js";
export { PROXY_LIMITS, type ProxyLimit } from "./http/limits/proxy-limits.js";
export {
  createProxy,
  type Proxy,
  type ProxyAddress,
  type ProxyOptions,
  type ProxyStatus,
} from "./proxy.js";
export type { RequestCountsStatus } from "./telemetry/request-counts.js";
