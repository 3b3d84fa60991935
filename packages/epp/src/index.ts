export {
  type PickerSettings,
  type PickerSettingsInput,
  pickerSettingsSchema,
} from "./config/settings.js";
export {
  createPicker,
  type Picker,
  type PickerAddress,
  type PickerOptions,
  type PickerStatus,
} from "./picker.js";
