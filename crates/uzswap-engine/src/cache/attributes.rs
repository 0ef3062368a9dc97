//! Attributes that are read, changed and kept while the cache is used.

use super::Cache;
use crate::config::ATTRIBUTES;
use crate::durable::Durable;
use crate::error::AttributeError;

impl Cache {
    /// An attribute's value, as its control file shows it.
    pub fn attribute(&self, name: &str) -> Option<String> {
        ATTRIBUTES.iter().find(|a| a.name == name).map(|a| (a.get)(&self.attributes))
    }

    /// Changes an attribute with immediate effect. On an error the old value stays.
    pub fn set_attribute(&self, name: &str, value: &str) -> Result<(), AttributeError> {
        let attribute = ATTRIBUTES.iter().find(|attribute| attribute.name == name);
        let attribute = attribute.ok_or_else(|| AttributeError::Unknown(name.into()))?;
        attribute.change(&self.attributes, value)?;
        if let Some(durable) = &self.durable {
            durable.keep_value(name, &(attribute.get)(&self.attributes));
        }
        self.apply_attributes();
        Ok(())
    }

    /// Sets the attributes as they were in a cache that is taken over.
    pub(crate) fn retake_attributes(&self, durable: &Durable) {
        for attribute in ATTRIBUTES {
            if let Some(value) = durable.value(attribute.name) {
                // A value that was accepted once is accepted again.
                let _ = (attribute.set)(&self.attributes, &value);
            }
        }
    }

    /// Makes changed attributes take effect.
    pub(crate) fn apply_attributes(&self) {
        self.pool.set_limit(self.attributes.pool_bytes_max() as usize);
        self.equip_all();
        self.ring();
    }
}
